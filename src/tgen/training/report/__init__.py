"""Reports beyond the loss: baselines, memorization, TensorBoard events."""
