"""Distributed training."""
