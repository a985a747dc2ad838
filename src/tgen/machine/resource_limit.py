"""Limits that a child process sets itself, before it handles what comes from outside."""

import time
from contextlib import suppress


def set_limit(name: str, limit: int) -> None:
    """Limit how much of a resource this process uses, where the platform supports it."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        number = getattr(resource, name)
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))


def limit_cpu_time(seconds: int) -> None:
    """End this process, where the platform supports it, after this CPU time from now on or up to
    two seconds more, without a core file. The parent ends it after `child.WALL_TIME` times the
    seconds."""
    set_limit("RLIMIT_CORE", 0)
    set_limit("RLIMIT_CPU", int(time.process_time()) + seconds + 1)
