"""Benchmarks of fine-tuning."""
