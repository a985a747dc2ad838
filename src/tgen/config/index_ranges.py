"""Parse and write ranges: layers and heads, parts of layers, slices of tokens."""

import re
from collections.abc import Collection, Sequence

from tgen.errors import UsageError, suggest

# Parts of a layer that `tgen inspect` can replace, and others of which there are activations.
PATCHED_PARTS = ("residual", "attention", "feed_forward", "heads")
PARTS = (*PATCHED_PARTS, "queries", "keys", "values", "attention_weights", "final_norm", "logits")

_RANGE = re.compile(r"(-?\d{1,9})(?:-(-?\d{1,9}))?")
_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?")
_INDEX = re.compile(r"-?\d{1,9}")


def parse_indices(option: str, spec: str, n: int) -> list[int]:
    """Parse `0,2-4`, `-1` or `all` of n things; negative numbers count from the last.

    Raises UsageError for anything else and for numbers out of range.
    """
    if spec == "all":
        return list(range(n))
    indices: list[int] = []
    for part in spec.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            hint = f"use, for example, {option} 0,2-4, or all"
            raise UsageError(f"{option}: not numbers or ranges (got {spec!r})", hint)
        first, last = (parse_index(option, end, n) for end in (match[1], match[2] or match[1]))
        if last < first:
            raise UsageError(f"{option}: {part.strip()} is reversed", f"write {last}-{first}")
        indices += [i for i in range(first, last + 1) if i not in indices]
    return indices


def parse_parts(option: str, spec: str, allowed: Sequence[str]) -> list[str]:
    """Parse `residual,heads` or `all` of the allowed parts; raises UsageError for others."""
    parts = [*allowed] if spec == "all" else [part.strip() for part in spec.split(",")]
    for part in parts:
        if part not in allowed:
            hint = suggest(part, allowed) or f"use {', '.join(allowed)}, or all"
            raise UsageError(f"{option}: not available (got {part!r})", hint)
    return list(dict.fromkeys(parts))


def parse_slice(option: str, spec: str, n: int) -> range:
    """Parse `57`, `-1` or `40:64` (40 to 63) of n positions; errors as `parse_indices`."""
    match = _SLICE.fullmatch(spec.strip())
    if match is None:
        i = parse_index(option, spec, n)
        return range(i, i + 1)
    positions = range(n)[slice(*(int(end) if end else None for end in match.groups()))]
    if not positions:
        raise UsageError(f"{option}: {spec} is empty", f"choose from 0 to {n - 1}")
    return positions


def parse_index(option: str, spec: str, n: int) -> int:
    """Parse a single index of n things; return it from 0 to n - 1."""
    if not _INDEX.fullmatch(spec.strip()):
        hint = f"use, for example, {option} 0 or -1"
        raise UsageError(f"{option}: not a number (got {spec!r})", hint)
    i = int(spec)
    if not -n <= i < n:
        hint = f"choose from {-n} to {n - 1}; negative numbers count from the last"
        raise UsageError(f"{option}: out of range (got {i}, expected {-n} to {n - 1})", hint)
    return i % n


def name_layers(layers: Collection[int]) -> str:
    """Return "layer 3" or "layers 0-4, 6"; at least one layer, in order."""
    firsts = (i for i in layers if i - 1 not in layers)
    lasts = (i for i in layers if i + 1 not in layers)
    ranges = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, lasts, strict=True)]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(ranges)}"
