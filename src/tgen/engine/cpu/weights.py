"""A model's weights in the kernels' layout: panels of rows, padded with zeros to whole groups.

Zeros do not change any sum. Attention heads are padded too, since the queries, keys and values of
all heads are rows of one matrix.
"""

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from tgen.checkpoint.dtypes import Array, to_float32
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.config import STORED_BYTES, ModelConfig, StoredAs, output_dtype
from tgen.engine.cpu import job_layout
from tgen.engine.cpu.aligned import allocate_aligned
from tgen.engine.cpu.job_layout import BFLOAT16, CACHE_LINE, FLOAT32, GROUP, INT4, INT8, PANEL
from tgen.engine.cpu.panels import int4_panels, int8_panels, to_panels
from tgen.model.ram import check_ram

_HINT = "choose a smaller --dtype or model"
_ROWS_AT_ONCE = 4096  # matrix rows converted together: whole panels
_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
_ACTIVATIONS = {
    "swiglu": job_layout.SWIGLU,
    "relu": job_layout.RELU,
    "gelu_tanh": job_layout.GELU_TANH,
    "gelu": job_layout.GELU,
    "geglu": job_layout.GEGLU,
}
_PLACEMENTS = {
    "pre": job_layout.PRE,
    "post": job_layout.POST,
    "parallel": job_layout.PARALLEL,
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

    def relocatable(self) -> tuple[Array, list[memoryview]]:
        """Return the table with places in memory instead of addresses, and that memory in blocks.

        Places are counted from the first block on; 0 are absent weights.
        """
        arrays = [*self._arrays, *([] if self._positions is None else [self._positions])]
        blocks, places, end = [memoryview(bytes(CACHE_LINE))], [0], CACHE_LINE
        starts = [0, *(array.ctypes.data for array in arrays)]
        for array in arrays:
            places.append(end)
            padding = -array.nbytes % CACHE_LINE
            blocks += [array.reshape(-1).view(np.uint8).data, memoryview(bytes(padding))]
            end += array.nbytes + padding
        order, table = np.argsort(starts), self.table.copy()
        addresses = table[:, : job_layout.WINDOW]
        owners = order[np.searchsorted(starts, addresses, "right", sorter=order) - 1]
        addresses += np.subtract(places, starts)[owners]
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
            job_layout.QK_NORM: config.qk_norm + config.qk_norm_over_heads,  # see EACH_HEAD
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
    return PackedWeights(config, dtype, table, [memory])


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
            final = self._norm_scale(job_layout.ATTENTION_NORM, take("final_norm.weight"))
            if final is not None and config.logits_divisor != 1:
                final = to_float32(final) / np.float32(config.logits_divisor)
            self._put(last, job_layout.ATTENTION_NORM, final)
            self._put(last, job_layout.ATTENTION_NORM_BIAS, take("final_norm.bias", None))
        self._put(last, job_layout.EMBEDDING, take("token_embedding.weight"))
        if config.tied_embeddings:
            for column in (0, job_layout.DTYPES):
                shared = self.table[last, column + job_layout.EMBEDDING]
                self.table[last, column + job_layout.LM_HEAD] = shared
        else:
            self._put(last, job_layout.LM_HEAD, take("lm_head.weight"))
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
        for name, array in parts.items():
            self._put(layer, name, self._norm_scale(name, array))
        self.table[layer, job_layout.WINDOW] = config.window(layer) or 0
        self.table[layer, job_layout.ROPE] = _ROPES[config.rope(layer)]

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
