"""Conversations: a model's chat template makes a text of them, and that becomes ids."""
