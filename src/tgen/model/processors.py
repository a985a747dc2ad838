"""How many processors there are, without torch."""

import os


def n_processors() -> int:
    """Those that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1
