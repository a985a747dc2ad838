"""The engines side by side, each behind the same three calls: rows, prefill, one step.

`rows(n)` forgets everything and makes n rows; `prefill(ids)` gives each row the same tokens;
`step(token)` appends one to each row. Both return the logits that follow, (n, V). Wherever an
engine can leave the logits where they are, it does.
"""

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shapes import Arrays
from tgen.config import ModelConfig

Logits = NDArray[np.float32]


class Arm(Protocol):
    """One engine with the model loaded."""

    def rows(self, n: int) -> None:
        """n empty rows."""

    def prefill(self, ids: Sequence[int]) -> Logits:
        """The same tokens to each."""

    def step(self, token: int) -> Logits:
        """One more token to each."""


class Tgen:
    """tgen's compiled kernels."""

    def __init__(self, config: ModelConfig, arrays: Arrays, threads: int, weights: str) -> None:
        from tgen.engine.cpu.engine import CpuEngine

        self.engine = CpuEngine(config, dict(arrays), n_threads=threads, stored=weights)
        self.n = 1

    def rows(self, n: int) -> None:
        """n empty rows."""
        self.engine.rewind([0] * self.n)
        self.engine.select([0] * n)
        self.n = n

    def prefill(self, ids: Sequence[int]) -> Logits:
        """The same tokens to each."""
        return self.engine.extend([list(ids)] * self.n)

    def step(self, token: int) -> Logits:
        """One more token to each."""
        return self.engine.extend([[token]] * self.n)


class Transformers:
    """transformers' model and cache, as `generate` calls them."""

    def __init__(self, config: ModelConfig, arrays: Arrays, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from tgen.checkpoint import model_dir

        torch.set_num_threads(threads)
        self.torch = torch
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_bytes(_config_json(config))
            Path(folder, model_dir.WEIGHTS).write_bytes(model_dir.weights(config, arrays))
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.n, self.past = 1, None

    def rows(self, n: int) -> None:
        """n empty rows."""
        self.n, self.past = n, None

    def prefill(self, ids: Sequence[int]) -> Logits:
        """The same tokens to each."""
        return self._run([list(ids)] * self.n)

    def step(self, token: int) -> Logits:
        """One more token to each."""
        return self._run([[token]] * self.n)

    def _run(self, ids: list[list[int]]) -> Logits:
        with self.torch.inference_mode():
            out = self.model(
                self.torch.tensor(ids), past_key_values=self.past, use_cache=True, logits_to_keep=1
            )
        self.past = out.past_key_values
        logits: Logits = out.logits[:, -1].numpy()
        return logits


class LlamaCpp:
    """llama.cpp by the C functions that llama-cpp-python makes available."""

    def __init__(self, config: ModelConfig, path: Path, threads: int) -> None:
        import llama_cpp

        self.c, self.vocab_size = llama_cpp, config.vocab_size
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_load_model_from_file(str(path).encode(), settings)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = config.context_length
        context.n_batch = context.n_ubatch = 512
        context.n_seq_max = 16
        context.n_threads = context.n_threads_batch = threads
        context.kv_unified = True
        self.context = llama_cpp.llama_new_context_with_model(self.model, context)
        self.batch = llama_cpp.llama_batch_init(512, 0, 16)
        self.n, self.length = 1, 0

    def rows(self, n: int) -> None:
        """n empty rows."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        self.n, self.length = n, 0

    def prefill(self, ids: Sequence[int]) -> Logits:
        """The same tokens to each."""
        return self._run(list(ids))

    def step(self, token: int) -> Logits:
        """One more token to each."""
        return self._run([token])

    def _run(self, ids: list[int]) -> Logits:
        batch = self.batch
        places = [(row, i) for row in range(self.n) for i in range(len(ids))]
        last = len(ids) - 1
        for k, (row, i) in enumerate(places):
            batch.token[k], batch.pos[k] = ids[i], self.length + i
            batch.n_seq_id[k], batch.seq_id[k][0] = 1, row
            batch.logits[k] = i == last
        batch.n_tokens = len(places)
        if self.c.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.length += len(ids)
        ends = [k for k, (_, i) in enumerate(places) if i == last]
        kind = ctypes.c_float * self.vocab_size
        found = [self.c.llama_get_logits_ith(self.context, k) for k in ends]
        return np.stack([np.frombuffer(kind.from_address(_place(p)), np.float32) for p in found])


def _place(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _config_json(config: ModelConfig) -> bytes:
    import json

    from tgen.checkpoint.hf import config as config_json

    return json.dumps(config_json.to_json(config, end_of_text=0, pad=0)).encode()
