"""A run on disk: training states with their manifests, tokens, and the training log."""
