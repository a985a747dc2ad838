"""GGUF files: reading and writing."""
