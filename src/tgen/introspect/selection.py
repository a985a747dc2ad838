"""Which layers, heads and tokens are meant."""

import re

from tgen.errors import UsageError

_RANGE = re.compile(r"(-?\d{1,9})(?:-(-?\d{1,9}))?")
_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?")
_ONE = re.compile(r"-?\d{1,9}")


def numbers(option: str, spec: str, n: int) -> list[int]:
    """`0,2-4`, `-1` or `all` of n things; negative numbers count from the last.

    Raises UsageError for anything else and for numbers that are not there.
    """
    if spec == "all":
        return list(range(n))
    found: list[int] = []
    for part in spec.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"{option} {spec!r} names no numbers", f"for example {option} 0,2-4, or all"
            )
        first, last = (one(option, end, n) for end in (match[1], match[2] or match[1]))
        if last < first:
            raise UsageError(f"{option} {part.strip()} goes backwards", f"write {last}-{first}")
        found += [i for i in range(first, last + 1) if i not in found]
    return found


def window(option: str, spec: str, n: int) -> range:
    """`57`, `-1` or `40:64` (40 to 63) of n positions; raises UsageError as `numbers`."""
    match = _SLICE.fullmatch(spec.strip())
    if match is None:
        i = one(option, spec, n)
        return range(i, i + 1)
    chosen = range(n)[slice(*(int(end) if end else None for end in match.groups()))]
    if not chosen:
        raise UsageError(f"{option} {spec} is empty", f"there are {n}: 0 to {n - 1}")
    return chosen


def one(option: str, spec: str, n: int) -> int:
    """A single number from 0 to n - 1."""
    if not _ONE.fullmatch(spec.strip()):
        raise UsageError(f"{option} {spec!r} is no number", f"for example {option} 0, or -1")
    return index(option, int(spec), n)


def index(option: str, i: int, n: int) -> int:
    """As `one`, of a number."""
    if not -n <= i < n:
        raise UsageError(
            f"{option} is {i}, but there are {n}: 0 to {n - 1}",
            f"choose {option} from {-n} to {n - 1}; negative ones count from the last",
        )
    return i % n
