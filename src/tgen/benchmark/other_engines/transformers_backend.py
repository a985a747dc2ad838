"""transformers' model and cache, called as its own `generate` calls them."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tgen.benchmark.backend import Backend
from tgen.benchmark.workload import Workload
from tgen.config import StoredAs
from tgen.engine.base import Logits
from tgen.errors import UsageError


class TransformersBackend(Backend):
    """transformers as a `Backend`. Without a KV cache (openai-gpt), all tokens are reprocessed."""

    thread_pool = "torch"

    def __init__(self, path: Path, *, threads: int, dtype: StoredAs, tokens: Sequence[int]) -> None:
        """Load the directory without network access; raises UsageError for integers."""
        if dtype in ("int8", "int4"):
            raise UsageError(
                f"--against transformers does not support --dtype {dtype}",
                "use --dtype float32 or bfloat16",
            )
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        kind = getattr(torch, dtype)
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True)
        self._model = loaded.eval()
        self._threads, self._tokens = threads, torch.tensor(tokens)
        parameters = inspect.signature(self._model.forward).parameters
        self._has_cache = "past_key_values" in parameters
        options = {"use_cache": True, "logits_to_keep": 1}
        self._options = {name: value for name, value in options.items() if name in parameters}
        self._batch, self._length = 1, 0  # sequences, cached tokens per sequence
        self._cache: Any = None
        self._logits: torch.Tensor | None = None

    def prepare(self, workload: Workload) -> None:
        """See `Backend.prepare`."""
        torch.set_num_threads(self._threads)  # global
        too_long = self._length > workload.n_depth and self._cache is not None
        has_dropped = too_long and any(self._cache.is_sliding)  # keys before the sliding window
        if workload.batch != self._batch or workload.n_depth == 0 or has_dropped:
            self._batch, self._length, self._cache = workload.batch, 0, None
        elif too_long:
            self._cache.crop(workload.n_depth - self._length)  # a negative number drops tokens
            self._length = workload.n_depth
        if not self._has_cache:
            self._length = workload.n_depth
        if self._length < workload.n_depth:
            self.extend(workload.n_depth - self._length)

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of cached keys and values."""
        if self._cache is None:
            return 0
        parts = [part for layer in self._cache.layers for part in (layer.keys, layer.values)]
        return sum(int(part.nbytes) for part in parts)

    def logits(self) -> Logits:
        """See `Backend.logits`."""
        assert self._logits is not None
        logits: Logits = self._logits.float().numpy().copy()
        return logits

    def close(self) -> None:
        """Free the model and the cache."""
        self._model = self._cache = self._logits = None

    @torch.inference_mode()
    def extend(self, n: int) -> None:
        """See `Backend.extend`."""
        begin, end = self._length if self._has_cache else 0, self._length + n
        tokens = self._tokens[begin:end].expand(self._batch, -1)
        cache = {"past_key_values": self._cache} if self._has_cache else {}
        out = self._model(tokens, **cache, **self._options)
        self._cache, self._length = out.get("past_key_values"), end
        self._logits = out.logits[:, -1]
