"""llama.cpp through llama-cpp-python's C bindings, with llama-bench's defaults.

The KV cache is float16 (tgen's is float32 with float32 weights) and attention is fused. For exact
logits the cache is float32 and fused attention is off, because it casts to float16 at every call.
Each sequence has its own stream, so that it attends to its own keys only.
"""

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from tgen.benchmark.backend import Backend
from tgen.benchmark.workload import Workload
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import GgufType, ModelConfig, StoredAs
from tgen.engine.base import Logits
from tgen.errors import ModelError, UsageError

_BATCH, _MICRO_BATCH = 2048, 512  # llama-bench's defaults
_CELLS = 256  # a stream's cache length is a multiple of this
_TYPES: dict[StoredAs, GgufType] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "q8_0",
    "int4": "q4_0",
}
_HINT = "add memory, or update llama.cpp: pip install -U llama-cpp-python"


@llama_cpp.llama_log_callback
def _discard_log(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Discard a message; module-level, since llama.cpp calls it until the process exits."""


class LlamaCppBackend(Backend):
    """llama.cpp as a `Backend`."""

    thread_pool = "llama.cpp"

    def __init__(
        self,
        config: ModelConfig,
        arrays: Mapping[str, NDArray[Any]],
        *,
        threads: int,
        dtype: StoredAs,
        tokens: Sequence[int],
        exact: bool = False,
    ) -> None:
        """Load the weights through a temporary file; raises ModelError if llama.cpp rejects them.

        `exact`: float32 KV cache, no fused attention.
        """
        llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._config, self._threads, self._exact = config, threads, exact
        self._tokens = np.array(tokens, np.int32)
        self._n_sequences, self._length = 0, 0  # sequences, cached tokens per sequence
        self._capacity = 0  # tokens per sequence
        self._context: Any = None
        self._model: Any = _load(config, arrays, dtype)

    def prepare(self, workload: Workload) -> None:
        """See `Backend.prepare`; another batch or capacity needs a new context."""
        if workload.batch != self._n_sequences or workload.n_tokens > self._capacity:
            self._make_context(workload.batch, workload.n_tokens)
        memory = llama_cpp.llama_get_memory(self._context)
        for sequence in range(self._n_sequences):
            llama_cpp.llama_memory_seq_rm(memory, sequence, workload.n_depth, -1)
        self._length = min(self._length, workload.n_depth)
        if self._length < workload.n_depth:
            self.extend(workload.n_depth - self._length)

    def logits(self) -> Logits:
        """See `Backend.logits`."""
        kind = ctypes.c_float * self._config.vocab_size
        first = self._batch.n_tokens - self._n_sequences
        pointers = [
            llama_cpp.llama_get_logits_ith(self._context, first + sequence)
            for sequence in range(self._n_sequences)
        ]
        arrays = [ctypes.cast(pointer, ctypes.POINTER(kind)).contents for pointer in pointers]
        return np.array(arrays, np.float32)

    def close(self) -> None:
        """Free the context and the model."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
        self._context = self._model = None

    def _make_context(self, n_sequences: int, n_tokens: int) -> None:
        """Make an empty context of `n_tokens` per sequence; UsageError for too many sequences."""
        limit = llama_cpp.llama_max_parallel_sequences()
        if n_sequences > limit:
            raise UsageError(
                f"--batch: llama.cpp supports at most {limit} sequences (got {n_sequences})",
                "use a smaller --batch",
            )
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = n_sequences * -(-n_tokens // _CELLS) * _CELLS
        settings.n_seq_max = n_sequences
        settings.n_batch, settings.n_ubatch = _BATCH, _MICRO_BATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        if self._exact:
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.offload_kqv = settings.op_offload = False
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot allocate {n_sequences} sequences of {n_tokens:,} tokens", _HINT
            )
        self._n_sequences, self._length, self._capacity = n_sequences, 0, n_tokens
        self._make_batch()

    def _make_batch(self) -> None:
        """Allocate the arrays of a call; the tokens of one position are adjacent."""
        n = _BATCH // self._n_sequences * self._n_sequences
        sequence_ids = np.arange(self._n_sequences, dtype=np.int32)
        addresses = sequence_ids.ctypes.data + 4 * np.arange(self._n_sequences, dtype=np.uint64)
        self._arrays: dict[str, NDArray[Any]] = {
            "token": np.zeros(n, np.int32),
            "pos": np.zeros(n, np.int32),
            "n_seq_id": np.ones(n, np.int32),
            "seq_id": np.tile(addresses.astype(np.uint64), n // self._n_sequences),
            "logits": np.zeros(n, np.int8),
            "sequence_ids": sequence_ids,  # keeps the memory that seq_id points to
        }
        self._batch = llama_cpp.llama_batch()
        for name, kind in self._batch._fields_:
            if name in self._arrays:
                setattr(self._batch, name, self._arrays[name].ctypes.data_as(kind))

    def extend(self, n: int) -> None:
        """Compute `n` more tokens, in calls of at most 2,048."""
        end, step = self._length + n, _BATCH // self._n_sequences
        for begin in range(self._length, end, step):
            self._decode(begin, min(begin + step, end), last=begin + step >= end)
        self._length = end
        llama_cpp.llama_synchronize(self._context)

    def _decode(self, begin: int, end: int, *, last: bool) -> None:
        n = (end - begin) * self._n_sequences
        positions = np.arange(begin, end, dtype=np.int32)
        self._arrays["token"][:n] = np.repeat(self._tokens[begin:end], self._n_sequences)
        self._arrays["pos"][:n] = np.repeat(positions, self._n_sequences)
        self._arrays["logits"][:n] = 0
        self._arrays["logits"][n - self._n_sequences : n] = last
        self._batch.n_tokens = n
        if llama_cpp.llama_decode(self._context, self._batch):
            raise ModelError("llama.cpp failed to compute", _HINT)


def _load(config: ModelConfig, arrays: Mapping[str, NDArray[Any]], dtype: StoredAs) -> Any:
    """Load the model from a temporary file, which is then deleted.

    A system that cannot delete a mapped file leaves it in its temporary directory.
    """
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    with tempfile.TemporaryDirectory(prefix="tgen-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "model.gguf")
        write_gguf(path, config, arrays, stored=_TYPES[dtype])
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise ModelError("llama.cpp cannot load this model", _HINT)
    return model
