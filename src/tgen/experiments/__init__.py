"""Experiments of several runs: comparison of runs."""
