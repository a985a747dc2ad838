"""A run on disk: training state, log, manifest, and the order in which they are written."""
