"""How results are kept: the record's schema, the run folder, the leaderboard, and the statistics of a cell."""
