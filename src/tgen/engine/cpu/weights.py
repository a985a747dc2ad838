"""A model's weights as the kernels read them: rows of whole groups, at known addresses.

Rows whose length is a multiple of 32 stay where they are; others are filled up with zeros, which
add nothing to any sum. So are heads, whose queries, keys and values are rows of one product.
"""

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig, StoredAs
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    FLOAT32,
    GELU,
    GELU_TANH,
    GROUP,
    GROUP_BYTES,
    INT8,
    RELU,
    SWIGLU,
)

Array = NDArray[Any]

_TOGETHER = 4096  # rows of a matrix that are converted at a time
_ACTIVATIONS = {"swiglu": SWIGLU, "relu": RELU, "gelu_tanh": GELU_TANH, "gelu": GELU}
_NAMES = {
    job_layout.ATTENTION_NORM: "attention_norm.weight",
    job_layout.ATTENTION_NORM_BIAS: "attention_norm.bias",
    job_layout.Q_NORM: "attention.q_norm.weight",
    job_layout.K_NORM: "attention.k_norm.weight",
    job_layout.OUT_BIAS: "attention.o_proj.bias",
    job_layout.FEED_NORM: "feed_forward_norm.weight",
    job_layout.FEED_NORM_BIAS: "feed_forward_norm.bias",
    job_layout.GATE: "feed_forward.gate_proj.weight",
    job_layout.GATE_BIAS: "feed_forward.gate_proj.bias",
    job_layout.UP: "feed_forward.up_proj.weight",
    job_layout.UP_BIAS: "feed_forward.up_proj.bias",
    job_layout.DOWN: "feed_forward.down_proj.weight",
    job_layout.DOWN_BIAS: "feed_forward.down_proj.bias",
}


class Weights:
    """A table of addresses for `forward`, and the arrays that it points to."""

    def __init__(
        self, config: ModelConfig, arrays: MutableMapping[str, Array], stored: StoredAs
    ) -> None:
        """Takes the arrays out of `arrays`, each as it is held."""
        self.config = config
        take: Callable[..., Any] = arrays.pop
        self.stored = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}[stored]
        self.table = np.zeros((config.n_layers + 1, job_layout.COLUMNS), np.int64)
        self._kept: list[Array] = []
        for layer in range(config.n_layers):
            mine = {name: take(f"blocks.{layer}.{full}", None) for name, full in _NAMES.items()}
            block = f"blocks.{layer}.attention."
            mine[job_layout.QKV] = _filled_heads(take(f"{block}qkv_proj.weight"), config)
            if (bias := take(f"{block}qkv_proj.bias", None)) is not None:
                mine[job_layout.QKV_BIAS] = _filled_heads(bias[:, None], config)[:, 0]
            mine[job_layout.OUT] = _filled_inputs(take(f"{block}o_proj.weight"), config)
            for name, array in mine.items():
                self._put(layer, name, array)
        self._put_last(take)
        self.positions = take("position_embedding.weight", None)

    def _put_last(self, take: Callable[..., Any]) -> None:
        last = self.config.n_layers
        if self.config.post_norm:  # no norm of its own: the last block's stands after it
            source, target = job_layout.FEED_NORM, job_layout.ATTENTION_NORM
            self.table[last, target : target + 2] = self.table[last - 1, source : source + 2]
        else:
            self._put(last, job_layout.ATTENTION_NORM, take("final_norm.weight"))
            self._put(last, job_layout.ATTENTION_NORM_BIAS, take("final_norm.bias", None))
        self._embedding = self._held(take("token_embedding.weight"))
        if self.config.tied_embeddings:
            self.table[last, job_layout.HEAD] = self._embedding.ctypes.data
        else:
            self._put(last, job_layout.HEAD, take("lm_head.weight"))

    def _put(self, layer: int, name: int, array: Array | None) -> None:
        if array is not None:
            ready = self._held(array)
            self._kept.append(ready)
            self.table[layer, name] = ready.ctypes.data

    def _held(self, array: Array) -> Array:
        """The array as the kernels read it; matrices as `stored`, a part at a time."""
        if array.ndim == 1 or self.stored == FLOAT32:
            return np.ascontiguousarray(_filled(to_float32(array), -1))
        store = to_bfloat16 if self.stored == BFLOAT16 else to_int8
        first = store(_filled(array[:_TOGETHER], -1))
        held = np.empty((len(array), first.shape[1]), first.dtype)
        for i in range(0, len(array), _TOGETHER):
            held[i : i + _TOGETHER] = store(_filled(array[i : i + _TOGETHER], -1))
        return held

    def embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n,) -> the tokens' vectors, (n, C)."""
        rows = self._embedding[ids]
        wide = from_int8(rows) if self.stored == INT8 else to_float32(rows)
        return wide[:, : self.config.d_model]

    def facts(self) -> dict[int, int]:
        """The job's fields that follow from the model."""
        config = self.config
        return {
            job_layout.N_LAYERS: config.n_layers,
            job_layout.WIDTH: config.d_model,
            job_layout.WIDTH_STEP: whole(config.d_model),
            job_layout.N_HEADS: config.n_heads,
            job_layout.N_KV_HEADS: config.n_kv_heads,
            job_layout.HEAD_DIM: config.head_dim,
            job_layout.HEAD_STEP: whole(config.head_dim),
            job_layout.FEED: config.d_ff,
            job_layout.FEED_STEP: whole(config.d_ff),
            job_layout.VOCABULARY: config.vocab_size,
            job_layout.STORED: self.stored,
            job_layout.LAYER_NORM: config.norm == "layer_norm",
            job_layout.POST_NORM: config.post_norm,
            job_layout.ACTIVATION: _ACTIVATIONS[config.activation],
            job_layout.QK_NORM: config.qk_norm,
            job_layout.ROTARY: config.position == "rotary",
            job_layout.WINDOW: config.sliding_window or 0,
            job_layout.EPS_BITS: _bits(config.norm_eps),
            job_layout.SCALE_BITS: _bits(config.head_dim**-0.5),
            job_layout.LAYERS_AT: self.table.ctypes.data,
        }


def whole(n: int) -> int:
    """The length of the vectors that hold n numbers."""
    return -(-n // GROUP) * GROUP


def to_float32(array: Array) -> NDArray[np.float32]:
    """Float32, float16 or bfloat16 as uint16 bits -> float32, without a copy where it is that."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def to_bfloat16(array: Array) -> NDArray[np.uint16]:
    """-> bfloat16 as uint16 bits, rounded to nearest, ties to even; finite weights only."""
    if array.dtype == np.uint16:
        return array
    bits = to_float32(array).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_int8(array: Array) -> NDArray[np.uint8]:
    """(m, n) -> (m, n / GROUP * GROUP_BYTES): of each group its scale, then whole numbers from -127
    to 127, the nearest to weight / scale."""
    groups = to_float32(array).reshape(len(array), -1, GROUP)
    wanted = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    held = ((wanted.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)  # rounded up to bfloat16
    scales = to_float32(held)
    numbers = np.rint(groups / np.where(scales > 0, scales, 1)).astype(np.int8)
    parts = [held.view(np.uint8), numbers.view(np.uint8)]
    return np.concatenate(parts, axis=2).reshape(len(array), -1)


def from_int8(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What `to_int8` holds: (m, n / GROUP * GROUP_BYTES) -> (m, n)."""
    groups = rows.reshape(len(rows), -1, GROUP_BYTES)
    scales = to_float32(np.ascontiguousarray(groups[:, :, :2]).view(np.uint16))
    return (groups[:, :, 2:].view(np.int8) * scales).reshape(len(rows), -1)


def _filled(array: Array, axis: int) -> Array:
    n = array.shape[axis]
    if n == whole(n):
        return array
    room = [(0, 0)] * array.ndim
    room[axis] = (0, whole(n) - n)
    return np.pad(array, room)


def _filled_heads(rows: Array, config: ModelConfig) -> Array:
    """(heads * D, C) -> (heads * whole D, C)."""
    heads = rows.reshape(-1, config.head_dim, rows.shape[1])
    return _filled(heads, 1).reshape(-1, rows.shape[1])


def _filled_inputs(rows: Array, config: ModelConfig) -> Array:
    """(C, H * D) -> (C, H * whole D)."""
    heads = rows.reshape(len(rows), config.n_heads, config.head_dim)
    return _filled(heads, 2).reshape(len(rows), -1)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
