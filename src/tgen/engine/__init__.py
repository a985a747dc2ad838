"""Engines compute the logits of the next token: compiled CPU kernels, or torch."""
