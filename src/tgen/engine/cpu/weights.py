"""A model's weights in the kernels' layout: panels of rows, padded with zeros to whole groups.

The panels have one of the kernels' dtypes, and values are rounded to it. Zeros do not change any
sum. Attention heads are padded too, since the queries, keys and values of all heads are rows of one
matrix.
"""

import ctypes
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint.dtypes import Array, Floats, to_bfloat16, to_float32
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.config import STORED_BYTES, ModelConfig, StoredAs, output_dtype
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.job_layout import (
    BFLOAT16,
    CACHE_LINE,
    FLOAT32,
    GROUP,
    INT4,
    INT8,
    PANEL,
    QUAD,
    allocate_aligned,
)
from tgen.machine.memory import check_ram

_LARGEST = np.float16(65504)
_FITS = 2  # least-squares fits of a 4-bit group, each to the integers of the previous one
_HINT = "choose a smaller --dtype or model"
_ROWS_AT_ONCE = 4096  # matrix rows converted together: whole panels
_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
_ACTIVATIONS = {
    "swiglu": job_layout.SWIGLU,
    "relu": job_layout.RELU,
    "relu2": job_layout.RELU2,
    "gelu_tanh": job_layout.GELU_TANH,
    "gelu": job_layout.GELU,
    "geglu": job_layout.GEGLU,
}
_PLACEMENTS = {
    "pre": job_layout.PRE,
    "post": job_layout.POST,
    "parallel": job_layout.PARALLEL,
    "shared": job_layout.PARALLEL,
    "output": job_layout.OUTPUT,
    "sandwich": job_layout.SANDWICH,
}
_ROPES = {None: 0, "global": job_layout.GLOBAL, "local": job_layout.LOCAL}
_NAMES = {
    job_layout.ATTENTION_NORM: "attention_norm.weight",
    job_layout.ATTENTION_NORM_BIAS: "attention_norm.bias",
    job_layout.ATTENTION_OUTPUT_NORM: "attention_output_norm.weight",
    job_layout.FEED_FORWARD_OUTPUT_NORM: "feed_forward_output_norm.weight",
    job_layout.Q_NORM: "attention.q_norm.weight",
    job_layout.K_NORM: "attention.k_norm.weight",
    job_layout.OUT_BIAS: "attention.o_proj.bias",
    job_layout.FEED_FORWARD_NORM: "feed_forward_norm.weight",
    job_layout.FEED_FORWARD_NORM_BIAS: "feed_forward_norm.bias",
    job_layout.GATE: "feed_forward.gate_proj.weight",
    job_layout.GATE_BIAS: "feed_forward.gate_proj.bias",
    job_layout.UP: "feed_forward.up_proj.weight",
    job_layout.UP_BIAS: "feed_forward.up_proj.bias",
    job_layout.DOWN: "feed_forward.down_proj.weight",
    job_layout.DOWN_BIAS: "feed_forward.down_proj.bias",
}
_NORMS = (
    job_layout.ATTENTION_NORM, job_layout.FEED_FORWARD_NORM, job_layout.ATTENTION_OUTPUT_NORM,
    job_layout.FEED_FORWARD_OUTPUT_NORM, job_layout.Q_NORM, job_layout.K_NORM,
)  # fmt: skip


def to_panels(rows: Array, dtype: int) -> Array:
    """Pack (m, n), with zeros to whole panels: float32 as (m / PANEL, n, PANEL), bfloat16 as
    (m / PANEL, n / 2, PANEL, 2), integers as (m / PANEL, n / GROUP, bytes of a group).

    The result may be a view of `rows`.
    """
    if dtype == INT8:
        return int8_panels(*to_int8(rows))
    if dtype == INT4:
        return int4_panels(*to_int4(rows))
    rows = _whole_panels(rows)
    rows = to_float32(rows) if dtype == FLOAT32 else to_bfloat16(rows)
    step = 2 if dtype == BFLOAT16 else 1
    panels = rows.reshape(-1, PANEL, rows.shape[1] // step, step).swapaxes(1, 2)
    return panels if step > 1 else panels[..., 0]


def to_int8(rows: Array) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantize (m, n): integers from -127 to 127 (m, n), and a scale per group (m, n / GROUP).

    A scale is the largest magnitude / 127, rounded up to float16.
    """
    groups = to_float32(rows).reshape(len(rows), -1, GROUP)
    exact = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    scales = _to_float16(exact)
    with np.errstate(over="ignore"):
        above = np.nextafter(scales, np.float16(np.inf))
    scales = np.minimum(np.where(scales < exact, above, scales), _LARGEST)
    wide = scales.astype(np.float32)
    numbers = np.rint(np.clip(groups / np.where(wide > 0, wide, 1), -127, 127)).astype(np.int8)
    return numbers.reshape(len(rows), -1), wide[:, :, 0].astype(np.float16)


def to_int4(rows: Array) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Quantize (m, n) to scale * integer + minimum: integers from 0 to 15 (m, n), and a scale and a
    minimum per group (m, n / GROUP).

    They begin as the range of the group, and are then fitted to its integers by least squares; of
    all, those with the smallest squared error are kept.
    """
    groups = to_float32(rows).reshape(-1, GROUP)
    minima = groups.min(axis=1)
    scales = (groups.max(axis=1) - minima) / np.float32(15)
    best: tuple[Array, ...] = _round_to_int4(groups, scales, minima)
    for _ in range(_FITS):
        numbers, error = best[0], best[3]
        fitted = _round_to_int4(groups, *_fit(groups, numbers))
        better = fitted[3] < error
        best = tuple(
            np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(fitted, best, strict=True)
        )
    numbers, *factors, _ = best
    scale, minimum = (factor.reshape(len(rows), -1) for factor in factors)
    return numbers.reshape(rows.shape), scale, minimum


def _round_to_int4(groups: Floats, scales: Floats, minima: Floats) -> tuple[Array, ...]:
    """Return the integers, scales and minima in float16, and the squared error of each group."""
    scale, minimum = _to_float16(scales), _to_float16(minima)
    step, start = (a.astype(np.float32)[:, None] for a in (scale, minimum))
    numbers = np.rint((groups - start) / np.where(step == 0, 1, step))
    np.clip(numbers, 0, 15, out=numbers)
    errors = step * numbers + start - groups
    return numbers.astype(np.uint8), scale, minimum, np.einsum("ij,ij->i", errors, errors)


def _fit(groups: Floats, numbers: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Return the scale and the minimum of each group with the smallest squared error."""
    x = numbers.astype(np.float32)
    centered = x - x.mean(axis=1, keepdims=True)
    variance = np.einsum("ij,ij->i", centered, centered)
    scales = np.einsum("ij,ij->i", centered, groups) / np.where(variance == 0, 1, variance)
    return scales, groups.mean(axis=1) - scales * x.mean(axis=1)


def _to_float16(numbers: Array) -> NDArray[np.float16]:
    return np.clip(numbers, -np.float32(_LARGEST), np.float32(_LARGEST)).astype(np.float16)


def int8_panels(numbers: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Per group, four columns of all rows after each other, each number 128 larger; then the scales
    of the rows."""
    return _groups(_quads(numbers.view(np.uint8) ^ 0x80), scales)


def int4_panels(
    numbers: NDArray[np.uint8], scales: NDArray[np.float16], minima: NDArray[np.float16]
) -> NDArray[np.uint8]:
    """Per group, eight columns of all rows after each other, the first four in the low halves of
    the bytes; then the scales and the minima of the rows."""
    quads = _quads(numbers)
    return _groups(quads[:, :, 0::2] | quads[:, :, 1::2] << 4, scales, minima)


def _whole_panels(rows: Array) -> Array:
    missing = -len(rows) % PANEL
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _quads(numbers: Array) -> Array:
    """(m, n) -> (m / PANEL, n / GROUP, GROUP / QUAD, PANEL, QUAD)."""
    panels = _whole_panels(numbers).reshape(
        -1, PANEL, numbers.shape[1] // GROUP, GROUP // QUAD, QUAD
    )
    return panels.transpose(0, 2, 3, 1, 4)


def _groups(quads: Array, *factors: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Join the bytes of each group and its factors, which are (m, n / GROUP)."""
    n_panels, n_groups = quads.shape[:2]
    parts = [quads.reshape(n_panels, n_groups, -1)]
    for factor in factors:
        columns = _whole_panels(factor).reshape(n_panels, PANEL, n_groups).swapaxes(1, 2)
        rows = np.ascontiguousarray(columns)
        parts.append(rows.view(np.uint8))
    return np.concatenate(parts, axis=2)


class PackedWeights:
    """Weights of a `dtype` in the kernels' layout, and the table of their addresses."""

    def __init__(
        self, config: ModelConfig, dtype: StoredAs, table: Array, arrays: list[Array]
    ) -> None:
        """`table` is (n_layers + 1, TABLE_COLUMNS), see `job_layout`; its addresses lie in the
        `arrays`, each of which begins at a cache line."""
        self.config, self.dtype, self.table = config, dtype, table
        self._arrays = arrays
        self._positions: Array | None = None
        self._base: PackedWeights | None = None  # whose memory the table refers to, too

    @property
    def n_bytes(self) -> int:
        """Bytes of these weights in whole cache lines, without those of another model."""
        return sum(-(-array.nbytes // CACHE_LINE) * CACHE_LINE for array in self._arrays)

    def share(self, base: "PackedWeights") -> None:
        """Use the memory of another model's weights for those that are equal bit by bit."""
        if self.config != base.config:
            return
        columns, own = slice(0, job_layout.WINDOW), []
        for array in self._arrays:
            is_here = self.table[:, columns] == array.ctypes.data
            layer, name = np.argwhere(is_here)[0]
            theirs, dtype = base.table[layer, [name, job_layout.DTYPES + name]]
            equal = False
            if theirs and dtype == self.table[layer, job_layout.DTYPES + name]:
                memory = (ctypes.c_uint8 * array.nbytes).from_address(int(theirs))
                equal = np.array_equal(np.ctypeslib.as_array(memory), array.reshape(-1).view("u1"))
            if equal:
                self.table[:, columns][is_here] = theirs
            else:
                own.append(array)
        self._arrays, self._base = own, base

    def relocatable(self) -> tuple[Array, list[memoryview]]:
        """Return the table with places in memory instead of addresses, and that memory in blocks.

        Places are counted from the first block on; 0 are absent weights. Only for weights that were
        packed, before the first pass.
        """
        blocks, places, end = [memoryview(bytes(CACHE_LINE))], {0: 0}, CACHE_LINE
        for array in self._arrays:
            places[array.ctypes.data] = end
            padding = -array.nbytes % CACHE_LINE
            blocks += [array.reshape(-1).view(np.uint8).data, memoryview(bytes(padding))]
            end += array.nbytes + padding
        table = self.table.copy()
        addresses = table[:, : job_layout.WINDOW]
        addresses[:] = [[places[address] for address in row] for row in addresses.tolist()]
        return table, blocks

    @property
    def input_dtype(self) -> int:
        """Data type of the inputs of products: that of the weights, or int8 beside int4."""
        return _DTYPES["int8" if self.dtype == "int4" else self.dtype]

    def set_positions(self, vectors: Array) -> None:
        """Use the float32 vectors (n, C), which are added to the embeddings."""
        self._positions = vectors
        self.table[self.config.n_layers, job_layout.POSITIONS] = vectors.ctypes.data

    def job_fields(self) -> dict[int, int]:
        """Return the job's fields that depend on the model only."""
        config = self.config
        return {
            job_layout.N_LAYERS: config.n_layers,
            job_layout.D_MODEL: config.d_model,
            job_layout.D_MODEL_PADDED: padded_length(config.d_model),
            job_layout.N_HEADS: config.n_heads,
            job_layout.N_KV_HEADS: config.n_kv_heads,
            job_layout.HEAD_DIM: config.head_dim,
            job_layout.HEAD_DIM_PADDED: padded_length(config.head_dim),
            job_layout.D_FF: config.d_ff,
            job_layout.D_FF_PADDED: padded_length(config.d_ff),
            job_layout.VOCAB_SIZE: config.vocab_size,
            job_layout.LAYER_NORM: config.norm == "layer_norm",
            job_layout.NORM_PLACEMENT: _PLACEMENTS[config.norm_placement],
            job_layout.ACTIVATION: _ACTIVATIONS[config.activation],
            job_layout.QK_NORM: _qk_norm(config),
            job_layout.N_ROTATED: config.n_rotated,
            job_layout.EPS_BITS: _float_bits(config.norm_eps),
            job_layout.SCALE_BITS: _float_bits(config.score_scale),
            job_layout.RESIDUAL_SCALE_BITS: _float_bits(config.residual_scale),
            job_layout.EMBEDDING_SCALE_BITS: _float_bits(config.embedding_scale),
            job_layout.LAYERS_PTR: self.table.ctypes.data,
        }


def map_weights(config: ModelConfig, dtype: StoredAs, table: Array, memory: Array) -> PackedWeights:
    """Use what `relocatable` returned, joined in `memory`, bytes that begin at a cache line.

    Raises ModelError if they do not fit into RAM.
    """
    check_ram(memory.nbytes, f"storing the weights as {dtype}", _HINT)
    table = table.copy()
    addresses = table[:, : job_layout.WINDOW]
    addresses[addresses > 0] += memory.ctypes.data
    weights = memory[CACHE_LINE:]  # place 0 means that there are none: see `relocatable`
    return PackedWeights(config, dtype, table, [weights])


def pack_weights(
    config: ModelConfig, arrays: MutableMapping[str, Array], dtype: StoredAs, *, n_threads: int
) -> PackedWeights:
    """Move the arrays out of `arrays`, so that no converted array exists twice. Each thread
    converts one layer at a time.

    With int4, the embedding and the LM head are int8, and so are matrices that a quantized file
    has in more than 4 bits, if others have 4. Raises ModelError if the converted arrays do not fit
    into RAM.
    """
    packing = _Packing(config, arrays, dtype, n_threads)
    return PackedWeights(config, dtype, packing.table, packing.arrays)


class _Packing:
    """The arrays that are packed so far, and their table; see `pack_weights`."""

    def __init__(
        self,
        config: ModelConfig,
        arrays: MutableMapping[str, Array],
        dtype: StoredAs,
        n_threads: int,
    ) -> None:
        self.config = config
        self._take: Callable[..., Any] = arrays.pop
        self.dtype, self._output_dtype = dtype, output_dtype(dtype)
        # The matrices of a file that have more than 4 bits keep them beside those that have not.
        self._mixed = any(_has_four_bits(array) for array in arrays.values())
        n_more = 0.0
        for name, array in arrays.items():
            stored_as = self._choose_dtype(array, is_block=name.startswith("blocks."))
            n_more += array.size * STORED_BYTES[stored_as] - array.nbytes
        check_ram(round(n_more), f"storing the weights as {dtype}", _HINT)
        self.table = np.zeros((config.n_layers + 1, job_layout.TABLE_COLUMNS), np.int64)
        self.arrays: list[Array] = []
        from concurrent.futures import ThreadPoolExecutor  # takes 10 ms to import

        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(self._put_layer, range(config.n_layers)))
        last, take = config.n_layers, self._take
        if not config.post_norm:  # else the last block ends with its own
            final: dict[int, Array | None] = {
                job_layout.ATTENTION_NORM: take("final_norm.weight", None),
                job_layout.ATTENTION_NORM_BIAS: take("final_norm.bias", None),
            }
            self._add_missing(final, job_layout.ATTENTION_NORM)
            for column, vector in final.items():
                vector = self._norm_scale(column, vector)
                if vector is not None and config.logits_divisor != 1:
                    vector = to_float32(vector) / np.float32(config.logits_divisor)
                self._put(last, column, vector)
        self._put(last, job_layout.EMBEDDING, take("token_embedding.weight"))
        if config.tied_embeddings:
            for column in (0, job_layout.DTYPES):
                shared = self.table[last, column + job_layout.EMBEDDING]
                self.table[last, column + job_layout.LM_HEAD] = shared
        else:
            self._put(last, job_layout.LM_HEAD, take("lm_head.weight"))
        self._put(last, job_layout.LM_HEAD_BIAS, take("lm_head.bias", None))
        if (positions := take("position_embedding.weight", None)) is not None:
            vectors = np.ascontiguousarray(to_float32(positions))
            self.arrays.append(vectors)
            self.table[last, job_layout.POSITIONS] = vectors.ctypes.data

    def _put_layer(self, layer: int) -> None:
        config, take = self.config, self._take
        parts = {name: take(f"blocks.{layer}.{full}", None) for name, full in _NAMES.items()}
        block = f"blocks.{layer}.attention."
        parts[job_layout.QKV] = _pad_heads(take(f"{block}qkv_proj.weight"), config)
        if (bias := take(f"{block}qkv_proj.bias", None)) is not None:
            parts[job_layout.QKV_BIAS] = _pad_heads(bias[:, None], config)[:, 0]
        parts[job_layout.OUT] = _pad_inputs(take(f"{block}o_proj.weight"), config)
        shared = config.norm_placement == "shared"
        self._add_missing(parts, job_layout.ATTENTION_NORM)
        if not shared:
            self._add_missing(parts, job_layout.FEED_FORWARD_NORM)
        for name, array in parts.items():
            self._put(layer, name, self._norm_scale(name, array))
        for i in range(2 if shared else 0):  # the weight and the bias
            row = self.table[layer]
            row[job_layout.FEED_FORWARD_NORM + i] = row[job_layout.ATTENTION_NORM + i]
        self.table[layer, job_layout.WINDOW] = config.window(layer) or 0
        self.table[layer, job_layout.ROPE] = _ROPES[config.rope(layer)]

    def _add_missing(self, parts: dict[int, Array | None], norm: int) -> None:
        """Add the weight 1 and the bias 0 of a LayerNorm that has no such parameters."""
        if self.config.norm == "layer_norm":
            for i in range(2):
                if parts.get(norm + i) is None:
                    parts[norm + i] = np.full(self.config.d_model, 1 - i, np.float32)

    def _norm_scale(self, name: int, array: Array | None) -> Array | None:
        """Return a norm's factors, padded like its input; return other arrays unchanged."""
        if array is None or name not in _NORMS:
            return array
        if self.config.norm_adds_one:
            array = 1 + to_float32(array)
        if self.config.qk_norm_over_heads and name in (job_layout.Q_NORM, job_layout.K_NORM):
            padded: Array = _pad_heads(array[:, None], self.config)
            return padded[:, 0]
        return array

    def _put(self, layer: int, name: int, array: Array | None) -> None:
        if array is not None:
            dtype = _DTYPES[self._choose_dtype(array, is_block=layer < self.config.n_layers)]
            packed = _pack(array, dtype)
            self.arrays.append(packed)
            self.table[layer, name] = packed.ctypes.data
            self.table[layer, job_layout.DTYPES + name] = dtype

    def _choose_dtype(self, array: Array, *, is_block: bool) -> StoredAs:
        if not is_block:
            return self._output_dtype
        return self.dtype if not self._mixed or _has_four_bits(array) else self._output_dtype


def _qk_norm(config: ModelConfig) -> int:
    if not config.qk_norm:
        return 0
    if config.qk_norm_after_rope:
        return job_layout.AFTER_ROPE
    return job_layout.OVER_HEADS if config.qk_norm_over_heads else job_layout.EACH_HEAD


def _has_four_bits(array: Array) -> bool:
    return isinstance(array, QuantizedMatrix) and array.has_four_bits


def _pack(array: Array, dtype: int) -> Array:
    """Pad vectors, and convert matrices to panels of the dtype, some rows at a time."""
    if array.ndim == 1:
        vector = allocate_aligned((padded_length(len(array)),))
        vector[: len(array)] = to_float32(array)
        return vector
    first = _panels(array, 0, 1, dtype)
    packed = allocate_aligned((-(-len(array) // PANEL), *first.shape[1:]), first.dtype)
    for i in range(0, len(array), _ROWS_AT_ONCE):
        panels = _panels(array, i, i + _ROWS_AT_ONCE, dtype)
        packed[i // PANEL : i // PANEL + len(panels)] = panels
    return packed


def _panels(array: Any, start: int, end: int, dtype: int) -> Array:
    """Convert some rows; those that a file has in 4 or 8 bits stay exactly as they are."""
    if dtype == INT4 and _has_four_bits(array):
        return int4_panels(*array.four_bit_groups(start, end))
    if dtype == INT8 and isinstance(array, QuantizedMatrix) and array.has_eight_bits:
        return int8_panels(*array.eight_bit_groups(start, end))
    return to_panels(_pad(array[start:end], -1), dtype)


def padded_length(n: int) -> int:
    """Round n up to whole groups."""
    return -(-n // GROUP) * GROUP


def _pad(array: Array, axis: int) -> Array:
    n = array.shape[axis]
    if n == padded_length(n):
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padded_length(n) - n)
    return np.pad(array, widths)


def _pad_heads(rows: Any, config: ModelConfig) -> Any:
    """(heads * D, C) -> (heads * padded D, C)."""
    if config.head_dim == padded_length(config.head_dim):
        return rows
    if isinstance(rows, QuantizedMatrix):  # of zero bytes, zeros are dequantized
        return rows.map_rows(lambda part: _pad_heads(part, config))
    heads = rows.reshape(-1, config.head_dim, rows.shape[1])
    return _pad(heads, 1).reshape(-1, rows.shape[1])


def _pad_inputs(rows: Array, config: ModelConfig) -> Array:
    """(C, heads * D) -> (C, heads * padded D)."""
    if config.head_dim == padded_length(config.head_dim):
        return rows
    heads = np.asarray(rows).reshape(len(rows), -1, config.head_dim)
    return _pad(heads, 2).reshape(len(rows), -1)


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
