"""Experiments of several runs: comparison of runs, and sweeps."""
