"""Low-rank adapters (LoRA, Hu et al. 2021) as arrays: W + scale B A for a frozen matrix W.

An adapter has one pair A (r, in), B (out, r) per matrix of transformers' model. A matrix of ours
may consist of several of theirs (queries, keys and values) or be a part of one (gate and up
projection of phi3). A `Part` says which rows of a matrix of ours belong to which pair.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Pair(NamedTuple):
    """The two factors of a change of a matrix, float32."""

    a: Floats  # (r, in)
    b: Floats  # (out, r)
    scale: float


class Part(NamedTuple):
    """Rows of a matrix of ours that a pair changes."""

    pair: str  # transformers' name of the matrix, without ".weight"
    start: int  # first row of ours
    n_rows: int
    pair_start: int  # first row of the pair's B, in the order of ours
    pair_rows: int  # rows of the pair's B
    n_inputs: int


Layout = Mapping[str, Sequence[Part]]  # by the name of our matrix, with ".weight"


class Shape(NamedTuple):
    """The rank of a pair, and the scale of its product."""

    rank: int
    scale: float


class NewAdapter(NamedTuple):
    """An adapter before the first step of a run."""

    layout: Layout
    shapes: Mapping[str, Shape]
    pairs: Mapping[str, Pair] | None = None  # to start from; None: A is random and B zero


def sample_a(pair: str, rank: int, n_inputs: int, seed: int) -> Floats:
    """Return A (rank, in) of a new adapter, uniform in +-1 / sqrt(in), from the seed and the name
    of the pair alone; B starts at zero."""
    key = int.from_bytes(hashlib.sha256(pair.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.Philox(key=[seed, key]))
    limit = n_inputs**-0.5
    return random.uniform(-limit, limit, (rank, n_inputs)).astype(np.float32)


def changes(layout: Layout, pairs: Mapping[str, Pair]) -> Iterator[tuple[str, int, Floats]]:
    """Yield each change: the name of our matrix, its first changed row, and the rows to add."""
    for name, parts in layout.items():
        for part in parts:
            if (pair := pairs.get(part.pair)) is not None:
                b = pair.b[part.pair_start : part.pair_start + part.n_rows]
                yield name, part.start, (b @ pair.a) * np.float32(pair.scale)


def parameter_shapes(layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of the parameters that `training.attach` makes."""
    found: dict[str, tuple[int, int]] = {}
    seen: set[tuple[str, ...]] = set()
    for name, every in layout.items():
        parts = [part for part in every if part.pair in shapes]
        key = tuple(part.pair for part in parts)
        path = name.removesuffix(".weight")
        if parts and key not in seen:
            seen.add(key)
            found[f"{path}.a"] = (sum(shapes[p.pair].rank for p in parts), parts[0].n_inputs)
        for i, part in enumerate(parts):
            found[f"{path}.b.{i}"] = (part.n_rows, shapes[part.pair].rank)
    return found
