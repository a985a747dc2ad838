"""Measures of a finished run: baselines, memorization, TensorBoard events."""
