"""`python -m tgen.engine.cpu` compiles the kernels ahead of the first use."""

from tgen.engine.cpu.kernel_cache import load_kernels

load_kernels()
