"""The number of CPUs, without torch."""

import os


def cpu_count(*, shared_by: int = 1) -> int:
    """Return the CPUs that this process may use, divided by `shared_by`, at least 1."""
    allowed = getattr(os, "sched_getaffinity", None)
    n = len(allowed(0)) if allowed else os.cpu_count() or 1
    return max(1, n // shared_by)
