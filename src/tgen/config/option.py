"""Options declared once: dataclass fields whose metadata serves every way to set them.

The command line (flags, help, panel), the fields of a JSONL row and the keyword arguments of the
Python API all come from the same declaration.
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from tgen.errors import UsageError

MAX_THREADS = 1024  # of `--threads` and `threads=`
# A quoted text, or a flag and the word after it, which may be its value.
_FLAG = re.compile(
    r"""(?<!\w)'[^']*'|(?<![\w./'"-])(--?[a-z][a-z-]*)(?![\w-])"""
    r"""(?:\ ('[^']*'|[^\s,;:)`-](?:[^\s,;)`]*[^\s,;:)`])?))?"""
)
MAX_WHOLE = 2**63 - 1  # of a field: files and arrays have 64 bits
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {  # what a field of a type takes, in words
    bool: ((bool,), "true or false"),
    str: ((str,), "a string"),
    Path: ((str, Path), "a path"),
    int: ((Integral,), "a whole number"),
}


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
    """Check types, numbers and choices of a dataclass of options; raise UsageError naming the
    field. A default is not checked."""
    for one in fields(config):
        value, expected = getattr(config, one.name), one.metadata.get("expected")
        if one.metadata.get("check_choices", True):
            check_choice(one.name, value, one.type)
        elif value is not None:
            require(isinstance(value, str), one.name, repr(value), "a string")
        kinds = get_args(one.type) if isinstance(one.type, UnionType) else (one.type,)
        if value is None and (NoneType in kinds or one.default is None):
            continue
        if expected:
            _check_number(one, value, expected)
        elif len(kinds) == 1 + (NoneType in kinds) and (kind := _KINDS.get(kinds[0])):
            is_kind = isinstance(value, kind[0])
            is_kind &= isinstance(value, bool) == (kinds[0] is bool)  # True is an int, too
            require(is_kind, one.name, repr(value), kind[1])


def widen_floats(config: Any) -> None:
    """Turn whole numbers in fields of floats into floats, as arrays and files need them."""
    for one in fields(config):
        value = getattr(config, one.name)
        if type(value) is int and float in (one.type, *get_args(one.type)):
            object.__setattr__(config, one.name, float(value))


def check_choice(name: str, value: Any, kind: Any) -> None:
    """Raise UsageError if `kind` is a Literal, or one with None, that does not have this value."""
    choices = _choices(kind)
    if choices and value not in choices:
        named = ", ".join(str(choice) for choice in choices if choice is not None)
        require(False, name, repr(value), f"one of {named}")


def check_combinations(
    given: Mapping[str, Mapping[str, Any]], show: Callable[[str], str] = str
) -> None:
    """Raise UsageError for options that cannot be combined; `given` has their metadata.

    An option's `excludes` are those that cannot be given with it, and `needs` has those of which it
    needs one: names of fields or, for a single value, NAME=VALUE. `hint` and `needs_hint` say what
    to do. `show` returns how a name is spelled.
    """
    for name, details in given.items():
        for other in details.get("excludes", "").split():
            if other in given:
                message = f"{show(name)} cannot be combined with {show(other)}"
                raise UsageError(message, details.get("hint", "remove one of them"))
        needs = details.get("needs", "").split()
        if needs and given.keys().isdisjoint(needs):
            others = [*map(show, needs)]
            hint = details.get("needs_hint", f"add {others[0]}, or remove {show(name)}")
            raise UsageError(f"{show(name)} needs {' or '.join(others)}", hint)


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
        require(value <= MAX_WHOLE, one.name, value, "a whole number below 2^63")
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


def flag_values(*configs: type) -> dict[str, tuple[str, Collection[str] | None]]:
    """Return each flag's field and the words that are known values of it; None for a switch."""
    return {
        spelling: (
            one.name,
            None
            if one.type in (bool, bool | None)
            else {*map(str, _choices(one.type)), *one.metadata.get("metavar", "").split("|")},
        )
        for config in configs
        for one in fields(config)
        for flag in one.metadata.get("flags", ())
        for spelling in flag.split("/")
    }


def replace_flags(
    text: str,
    flags: Mapping[str, tuple[str, Collection[str] | None]],
    spell: Callable[[str, str], str],
) -> str:
    """Return a message for another interface than the command line, with names for its flags.

    `flags` is as in `flag_values`; `spell` returns a name with its value, such as top_k=5. Flags
    that `flags` lacks stay as they are.
    """

    def replace(match: re.Match[str]) -> str:
        flag, word = match[1], match[2] or ""
        if flag not in flags:  # or None: a quoted text
            return match[0]
        name, values = flags[flag]
        rest = f" {word}" if word else ""
        if values is None:
            return spell(name, str(not flag.startswith("--no-"))) + rest
        is_value = word in values or word.isupper() or set(word) & set("0123456789./\\'")
        return spell(name, word) if word and is_value else name + rest

    return _FLAG.sub(replace, text)
