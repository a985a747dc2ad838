"""Every token in compiled code: Numba makes it from Python, no C compiler is needed."""
