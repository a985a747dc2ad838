"""The transformer and its KV cache."""
