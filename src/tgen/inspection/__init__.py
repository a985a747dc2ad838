"""Inspection of a model: attention, predictions, their attribution, and self-checks of them."""
