"""AMX, the CPU's matrix instructions, which Linux permits to processes that ask for it."""

import ctypes
import sys
from functools import cache

from tgen.engine.cpu.job_layout import HAS_AMX
from tgen.engine.cpu.kernel_cache import enter_function

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def may_use_amx() -> bool:
    """Whether the kernels are compiled for AMX and this process may use it; asks for it."""
    if sys.platform != "linux" or not enter_function()(HAS_AMX, *[0] * 7):
        return False
    arguments = (ctypes.c_long(n) for n in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return bool(ctypes.pythonapi.syscall(*arguments) == 0)
