"""Low-rank adapters: their layout, training, files in PEFT's format, and merging."""
