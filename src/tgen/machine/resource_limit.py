"""A limit that a child process sets itself, before it handles what comes from outside."""

from contextlib import suppress


def set_limit(name: str, limit: int) -> None:
    """Limit how much of a resource this process uses, where the platform supports it."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        number = getattr(resource, name)
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
