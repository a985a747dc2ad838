"""The most memory that this process has held."""

import sys
from pathlib import Path

from tgen.storage import files

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int | None:
    """Resident bytes at their most since the process began; None where the system does not say.

    On Linux not what getrusage calls ru_maxrss: that begins with the peak of the process that made
    this one, so that a small child of a large parent would seem as large.
    """
    if _STATUS.exists():
        for line in files.read(_STATUS).splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
