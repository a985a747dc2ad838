"""Conversations: the model's chat template renders messages as text, which is tokenized."""
