"""The training plan: model, hyperparameters and their reasons, computed without torch."""
