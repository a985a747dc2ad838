"""Training: the loop, loss and evaluation, optimizers, schedule and resumable state."""
