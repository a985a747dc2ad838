"""python -m tgen.engine.cpu: compiles the kernels ahead of the first use."""

import tgen.engine.cpu.threads  # noqa: F401
