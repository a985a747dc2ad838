"""Options declared once: dataclass fields whose metadata serves every way to set them.

The command line (flags, help, panel), the fields of a JSONL row and the keyword arguments of the
Python API all come from the same declaration.
"""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

from tgen.errors import UsageError

MAX_THREADS = 1024  # of `--threads` and `threads=`


def option(
    default: Any = MISSING,
    help_text: str = "",
    flags: str = "",
    *,
    default_factory: Callable[[], Any] | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    expected: str = "",
    compare: bool = True,
    **cli: Any,
) -> Any:
    """Declare a dataclass field that is an option.

    `flags` are its spellings on the command line, separated by spaces; a field without flags is
    set from Python alone. `check_ranges` accepts numbers from `low` to `high`, described by
    `expected`.
    `cli` goes to `tgen.cli.options`: panel, metavar, shown_default, excludes, needs, ...
    """
    if not expected and low > -math.inf:
        expected = f"a number of at least {low:,}"
        if high < math.inf:
            expected = f"a number from {low:,} to {high:,}"
    metadata = {"help": help_text, "flags": flags.split(), "low": low, "high": high, **cli}
    metadata["expected"] = expected
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata, compare=compare)
    return field(default=default, metadata=metadata, compare=compare)


def check_ranges(config: Any) -> None:
    """Check numbers and choices of a dataclass of options; raise UsageError naming the field."""
    for one in fields(config):
        value, expected = getattr(config, one.name), one.metadata.get("expected")
        if one.metadata.get("check_choices", True):
            check_choice(one.name, value, one.type)
        if one.type is bool:
            require(isinstance(value, bool), one.name, repr(value), "true or false")
        if expected and not (value is None and one.default is None):
            _check_number(one, value, expected)


def check_choice(name: str, value: Any, kind: Any) -> None:
    """Raise UsageError if `kind` is a Literal, or one with None, that does not have this value."""
    choices = _choices(kind)
    if choices and value not in choices:
        named = ", ".join(str(choice) for choice in choices if choice is not None)
        require(False, name, repr(value), f"one of {named}")


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, or of a Literal with None; of other types none."""
    for one in (kind, *get_args(kind)):
        if get_origin(one) is Literal:
            return get_args(one) if one is kind else (*get_args(one), None)
    return ()


def _check_number(one: Field[Any], value: Any, expected: str) -> None:
    low, high, is_valid = one.metadata["low"], one.metadata["high"], is_number(value)
    if "int" in str(one.type):
        is_whole = is_valid and isinstance(value, Integral)
        require(is_whole, one.name, repr(value), "a whole number")
    else:
        require(is_valid, one.name, repr(value), expected)
        if isinstance(value, int):  # may be too large for a float
            high = min(high, sys.float_info.max)
    if value == math.inf:
        expected = expected.replace("a number", "a finite number", 1)
    require(low <= value <= high and value < math.inf, one.name, value, expected)


def is_number(value: object) -> bool:
    """Return whether a value is a real number; booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise UsageError unless `holds`; NaN compares false, so it is rejected too.

    The message shows the first 60 characters of the value, which may come from outside.
    """
    if not holds:
        message, hint = f"{name}: invalid value {value!s:.60}", f"set {name} to {expected}"
        raise UsageError(message, hint, field=name)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint for a misspelled option, or "" if no known one is similar."""
    similar = get_close_matches(name, known, 1)
    return f"did you mean {similar[0]}?" if similar else ""
