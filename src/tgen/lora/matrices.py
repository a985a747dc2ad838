"""Low-rank adapters (LoRA, Hu et al. 2021) as arrays: W + scale B A for a frozen matrix W.

An adapter has one pair A (r, in), B (out, r) per matrix of transformers' model. A matrix of ours
may consist of several of theirs (queries, keys and values) or be a part of one (gate and up
projection of phi3). A `Part` says which rows of a matrix of ours belong to which pair, and
`new_shapes` which matrices a new adapter changes.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.hf import tensor_names
from tgen.config import ModelConfig
from tgen.errors import ModelError

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
    """Return the names and shapes of the parameters that `layers.attach` makes."""
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


def adapter_layout(config: ModelConfig) -> dict[str, list[Part]]:
    """Return the parts of all matrices in the blocks that an adapter can change, by our names."""
    layout: dict[str, list[Part]] = {}
    for mapping in tensor_names.tensor_mappings(config):
        if not mapping.ours[0].startswith("blocks.") or len(mapping.shapes[0]) != 2:
            continue
        end = 0
        spans = []
        for name, shape in zip(mapping.theirs, mapping.shapes, strict=True):
            n_out, n_in = shape[::-1] if mapping.transposed else shape
            path = tensor_names.full_name(config, name).removesuffix(".weight")
            spans.append((path, end, end + n_out, n_in))
            end += n_out
        start = 0
        for ours, n_rows in zip(mapping.ours, mapping.rows, strict=True):
            layout[ours] = [
                Part(
                    path,
                    max(first, start) - start,
                    min(last, start + n_rows) - max(first, start),
                    max(first, start) - first,
                    last - first,
                    n_in,
                )
                for path, first, last, n_in in spans
                if first < start + n_rows and start < last
            ]
            start += n_rows
    return layout


def new_shapes(config: ModelConfig, rank: int, alpha: float, targets: str) -> dict[str, Shape]:
    """Return the shapes of a new adapter for `targets`: all, attention or feed_forward.

    Raises ModelError if the rank is larger than a matrix.
    """
    shapes: dict[str, Shape] = {}
    for name, parts in adapter_layout(config).items():
        if targets != "all" and f".{targets}." not in name:
            continue
        for part in parts:
            check_rank(rank, part, f"--lora {rank}")
            shapes[part.pair] = Shape(rank, alpha / rank)
    return shapes


def check_rank(rank: int, part: Part, what: str) -> None:
    """Raise ModelError if a rank is larger than the matrix of a pair; it begins with `what`."""
    limit = min(part.pair_rows, part.n_inputs)
    if rank > limit:
        raise ModelError(
            f"{what} is larger than the matrix {part.pair} ({part.pair_rows} x {part.n_inputs})",
            f"use a rank of at most {limit}",
        )
