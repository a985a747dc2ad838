"""Measuring: trials -> statistics -> reports."""
