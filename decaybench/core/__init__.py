"""What every part may use: configuration, names, hashing, counter-based draws, positions, logging."""
