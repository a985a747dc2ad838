"""The CPU engine: kernels compiled from Python, without a C compiler. See README.md."""
