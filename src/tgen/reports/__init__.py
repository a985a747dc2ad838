"""Frozen records of plain numbers, with units in their names.

The terminal reads them, `--json` writes them, tests compare them.
"""
