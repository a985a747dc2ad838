"""Benchmarks: trials -> statistics -> reports."""
