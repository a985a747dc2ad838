"""The training plan: what to train and why, computed without torch."""
