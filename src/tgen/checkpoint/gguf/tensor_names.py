"""llama.cpp's architectures, and its names and shapes of a model's tensors, both ways.

Its names are one set for all families. Where its `llama` turns the neighbours (x_2i, x_2i+1), tgen
and its other architectures turn (x_i, x_i+D/2): the rows of q and k stand in another order there.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tgen.checkpoint.dtypes import Array, dtype_of, to_float32
from tgen.checkpoint.hf import tensor_names
from tgen.config import ModelConfig
from tgen.errors import ModelError

Shape = tuple[int, ...]

# Ours -> theirs. llama.cpp's llama has no sliding window, so that only shorter mistrals fit it.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
ROPE_FREQS = "rope_freqs.weight"
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.qkv_proj": "attn_qkv",
    "attention.o_proj": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}


class Part(NamedTuple):
    """One of their tensors: rows of one of ours."""

    name: str
    shape: Shape
    heads: int  # whose halves take turns there; 0: the rows stand in our order


def tensor_mappings(config: ModelConfig) -> Iterator[tuple[str, list[Part]]]:
    """Our tensors, each with theirs that are stacked to it."""
    turned = ARCHITECTURES[config.family] == "llama"
    heads = (config.n_heads, config.n_kv_heads, 0)
    for row in tensor_names.tensor_mappings(config):
        prefix, stem, part = _split(row.ours)
        shapes = [shape[::-1] if row.transposed else shape for shape in row.shapes]
        if len(shapes) == 1:
            yield row.ours, [Part(f"{prefix}{_NAMES[stem]}.{part}", shapes[0], 0)]
            continue
        names = [f"{prefix}attn_{letter}.{part}" for letter in "qkv"]
        turns = heads if turned else (0, 0, 0)
        yield row.ours, [Part(*parts) for parts in zip(names, shapes, turns, strict=True)]


def to_layout(config: ModelConfig, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Our arrays under llama.cpp's names, contiguous, one at a time."""
    for ours, parts in tensor_mappings(config):
        start = 0
        for name, shape, heads in parts:
            piece = arrays[ours][start : start + shape[0]]
            yield name, np.ascontiguousarray(_interleaved(piece, heads) if heads else piece)
            start += shape[0]


def from_layout(config: ModelConfig, arrays: dict[str, Array]) -> dict[str, Array]:
    """Their arrays, which are taken away, under our names; `check` has passed."""
    out: dict[str, Array] = {}
    for ours, parts in tensor_mappings(config):
        pieces = [arrays.pop(part.name) for part in parts]
        if len({dtype_of(piece) for piece in pieces}) > 1:
            pieces = [to_float32(piece) for piece in pieces]
        pieces = [
            _in_halves(piece, part.heads) if part.heads else piece
            for piece, part in zip(pieces, parts, strict=True)
        ]
        out[ours] = np.ascontiguousarray(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
    return out


def check(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raises ModelError with the first differences if a file's tensors are not the model's."""
    if config.n_layers > len(shapes):  # whose names need not be thought of
        raise ModelError(
            f"it has {config.n_layers:,} layers and {len(shapes):,} tensors",
            "the file is damaged, or of a model that tgen does not run",
        )
    wanted = {part.name: part.shape for _, parts in tensor_mappings(config) for part in parts}
    extra = [n for n in shapes if n not in wanted and n != ROPE_FREQS]
    problems = [f"{n} is missing" for n in wanted if n not in shapes]
    problems += [
        f"{n} has shape {list(shapes[n])}, not {list(shape)}"
        for n, shape in wanted.items()
        if shapes.get(n, shape) != shape
    ]
    problems += [f"{n} is not part of the model" for n in extra]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ModelError(
            f"its tensors and its fields disagree: {'; '.join(problems[:5])}{more}",
            "the file is damaged, or of a model that tgen does not run",
        )


def _split(ours: str) -> tuple[str, str, str]:
    """blocks.3.attention.o_proj.bias -> blk.3., attention.o_proj, bias."""
    stem, _, part = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return "", stem, part
    _, layer, stem = stem.split(".", 2)
    return f"blk.{layer}.", stem, part


def _interleaved(rows: Array, n_heads: int) -> Array:
    """(heads * D, ...) -> the same, each head's halves in turns."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _in_halves(rows: Array, n_heads: int) -> Array:
    """What `_interleaved` made, back again."""
    pairs = rows.reshape(n_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
