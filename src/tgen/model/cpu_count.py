"""How many processors there are, without torch."""

import os


def cpu_count(*, shared_by: int = 1) -> int:
    """Those that this process may use, or its part of what so many processes share; at least 1."""
    allowed = getattr(os, "sched_getaffinity", None)
    n = len(allowed(0)) if allowed else os.cpu_count() or 1
    return max(1, n // shared_by)
