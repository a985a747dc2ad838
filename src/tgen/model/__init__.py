"""The transformer and its key-value cache."""
