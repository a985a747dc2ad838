"""Models on disk: Hugging Face model directories, GGUF files and prompt caches."""
