"""Conversations: a model's chat template renders the messages as text, which becomes ids."""
