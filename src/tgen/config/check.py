"""Refusing a value, with the field's name and what it may be."""

from tgen.errors import UsageError


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Raises UsageError unless it holds."""
    if not holds:  # written so that NaN, for which every comparison is false, is refused too
        raise UsageError(f"{name} is {value}", f"{name} must be {wanted}", field=name)
