"""Records that the core hands out: frozen, plain numbers, units in the names.

The terminal reads them, `--json` writes them, tests compare them.
"""
