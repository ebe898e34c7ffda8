"""Text for language models: tokenizers, documents from files, and token shards."""
