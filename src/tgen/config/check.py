"""Checks of configuration values."""

from tgen.errors import UsageError


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise UsageError unless `holds`; NaN compares false, so it is refused too."""
    if not holds:
        message, hint = f"{name}: invalid value {value}", f"set {name} to {expected}"
        raise UsageError(message, hint, field=name)
