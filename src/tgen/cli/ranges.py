"""Which layers, heads, tokens and lengths are meant."""

import re
from collections.abc import Sequence

from tgen.errors import UsageError

_RANGE = re.compile(r"(-?\d{1,9})(?:-(-?\d{1,9}))?")
_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?")
_ONE = re.compile(r"-?\d{1,9}")
_STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")
_MOST = 10_000  # values of one range


def parse_indices(option: str, spec: str, n: int) -> list[int]:
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


def parse_slice(option: str, spec: str, n: int) -> range:
    """`57`, `-1` or `40:64` (40 to 63) of n positions; raises UsageError as `parse_indices`."""
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
    i = int(spec)
    if not -n <= i < n:
        raise UsageError(
            f"{option} is {i}, but there are {n}: 0 to {n - 1}",
            f"choose {option} from {-n} to {n - 1}; negative ones count from the last",
        )
    return i % n


def parse_sizes(option: str, specs: Sequence[str]) -> list[int]:
    """`512`, `128,256`, `16-64+16` (16, 32, 48, 64) and `16-64*2` (16, 32, 64), each value once.

    Raises UsageError for anything else.
    """
    found: list[int] = []
    for part in (part.strip() for spec in specs for part in spec.split(",")):
        match = _STEPS.fullmatch(part)
        if match is None:
            raise UsageError(
                f"{option} {part!r} is no number",
                f"for example {option} 512, 128,256, 64-256+64 or 64-512*2",
            )
        first, last, by = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
        grows = match[3] == "*"
        if last < first or by < 1 + grows or (grows and not first) or (last - first) // by > _MOST:
            raise UsageError(f"{option} {part} is no range", f"for example {option} 64-512*2")
        while first <= last:
            found.append(first)
            first = first * by if grows else first + by
    return list(dict.fromkeys(found))
