"""`python -m tgen.engine.cpu` compiles the kernels for all dtypes ahead of the first use."""

from tgen.engine.cpu.kernel_cache import DEFAULTS, load_kernels

load_kernels(*DEFAULTS)
