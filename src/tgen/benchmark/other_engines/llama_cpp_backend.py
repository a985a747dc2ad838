"""llama.cpp, by the C functions that llama-cpp-python makes available, set as llama-bench sets it.

That is with keys and values in float16, where ours are float32, and its fused attention. To compare
logits they are float32 too, and the fused attention off: it would cast them to float16 at every
call. Each row has a stream of its own, so that it pays for its own keys alone.
"""

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from tgen.benchmark.throughput import Workload
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import ModelConfig, StoredAs
from tgen.engine.base import Logits
from tgen.errors import ModelError, UsageError

_BATCH, _MICRO_BATCH = 2048, 512  # llama-bench's
_CELLS = 256  # a stream's cache is a multiple of it long


@llama_cpp.llama_log_callback
def _silence(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Here, since llama.cpp calls it for as long as the process lives."""


class LlamaCpp:
    """See `peers.Peer`."""

    runs_on = "llama.cpp"

    def __init__(
        self,
        config: ModelConfig,
        arrays: Mapping[str, NDArray[Any]],
        *,
        threads: int,
        stored: StoredAs,
        tokens: Sequence[int],
        exact: bool = False,
    ) -> None:
        """Loads the weights through a temporary file; raises ModelError if it cannot run them.

        `exact`: keys and values as float32.
        """
        llama_cpp.llama_log_set(_silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._config, self._threads, self._exact = config, threads, exact
        self._tokens = np.array(tokens, np.int32)
        self._rows, self._held = 0, 0  # tokens in each row
        self._room = 0  # tokens that the context was made for
        self._context: Any = None
        self._model: Any = _load(config, arrays, stored)

    def prepare(self, test: Workload) -> None:
        """What is there already of the depth stays, unless other rows or longer ones are needed."""
        if test.batch != self._rows or test.n_tokens > self._room:
            self._make_context(test.batch, test.n_tokens)
        memory = llama_cpp.llama_get_memory(self._context)
        for row in range(self._rows):
            llama_cpp.llama_memory_seq_rm(memory, row, test.n_depth, -1)
        self._held = min(self._held, test.n_depth)
        if self._held < test.n_depth:
            self._read(test.n_depth - self._held)

    def prompt(self, test: Workload) -> None:
        """In calls of at most 2,048 tokens."""
        self._read(test.n_prompt)

    def step(self) -> None:
        """In one call."""
        self._read(1)

    @property
    def cache_bytes(self) -> int | None:
        """It does not say."""
        return None

    def logits(self) -> Logits:
        """(B, V): what the last prompt or step gave."""
        kind = ctypes.c_float * self._config.vocab_size
        first = self._batch.n_tokens - self._rows
        places = [
            llama_cpp.llama_get_logits_ith(self._context, first + row) for row in range(self._rows)
        ]
        found = [ctypes.cast(place, ctypes.POINTER(kind)).contents for place in places]
        return np.array(found, np.float32)

    def close(self) -> None:
        """Frees the context and the model."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        if self._model is not None:
            llama_cpp.llama_model_free(self._model)
        self._context = self._model = None

    def _make_context(self, rows: int, n_tokens: int) -> None:
        """Empty rows with room for as many tokens each; raises UsageError for too many rows."""
        most = llama_cpp.llama_max_parallel_sequences()
        if rows > most:
            raise UsageError(f"llama.cpp takes no {rows} rows", f"it takes {most} at most")
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = rows * -(-n_tokens // _CELLS) * _CELLS
        settings.n_seq_max = rows
        settings.n_batch, settings.n_ubatch = _BATCH, _MICRO_BATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        if self._exact:
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.offload_kqv = settings.op_offload = False
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ModelError(f"llama.cpp makes no {rows} rows of {n_tokens:,} tokens", _HINT)
        self._rows, self._held, self._room = rows, 0, n_tokens
        self._make_batch()

    def _make_batch(self) -> None:
        """Where calls find tokens: those of one position side by side, a row in each place."""
        n = _BATCH // self._rows * self._rows
        row_numbers = np.arange(self._rows, dtype=np.int32)
        addresses = row_numbers.ctypes.data + 4 * np.arange(self._rows, dtype=np.uint64)
        self._arrays: dict[str, NDArray[Any]] = {
            "token": np.zeros(n, np.int32),
            "pos": np.zeros(n, np.int32),
            "n_seq_id": np.ones(n, np.int32),
            "seq_id": np.tile(addresses.astype(np.uint64), n // self._rows),
            "logits": np.zeros(n, np.int8),
            "row_numbers": row_numbers,  # held for those who point at it
        }
        self._batch = llama_cpp.llama_batch()
        for name, kind in self._batch._fields_:
            if name in self._arrays:
                setattr(self._batch, name, self._arrays[name].ctypes.data_as(kind))

    def _read(self, n: int) -> None:
        """n more tokens into each row, until the logits that follow are there."""
        end, most = self._held + n, _BATCH // self._rows
        for begin in range(self._held, end, most):
            self._decode(begin, min(begin + most, end), last=begin + most >= end)
        self._held = end
        llama_cpp.llama_synchronize(self._context)

    def _decode(self, begin: int, end: int, *, last: bool) -> None:
        n = (end - begin) * self._rows
        self._arrays["token"][:n] = np.repeat(self._tokens[begin:end], self._rows)
        self._arrays["pos"][:n] = np.repeat(np.arange(begin, end, dtype=np.int32), self._rows)
        self._arrays["logits"][:n] = 0
        self._arrays["logits"][n - self._rows : n] = last
        self._batch.n_tokens = n
        if llama_cpp.llama_decode(self._context, self._batch):
            raise ModelError("llama.cpp failed to compute", _HINT)


_HINT = "it may lack memory, or be older than the model: pip install -U llama-cpp-python"


def _load(config: ModelConfig, arrays: Mapping[str, NDArray[Any]], stored: StoredAs) -> Any:
    """The model, the file gone again; where files that are mapped cannot go, the system's cleaner
    takes it."""
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    with tempfile.TemporaryDirectory(prefix="tgen-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "model.gguf")
        write_gguf(path, config, arrays, stored=stored)
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise ModelError("llama.cpp does not load this model", _HINT)
    return model
