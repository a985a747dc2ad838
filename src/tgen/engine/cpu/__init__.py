"""The CPU engine: kernels that Numba compiles from Python, without a C compiler. See README.md."""
