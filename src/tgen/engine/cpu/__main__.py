"""python -m tgen.engine.cpu: compiles the kernels ahead of the first use."""

from tgen.engine.cpu.compiled import kernels

kernels()
