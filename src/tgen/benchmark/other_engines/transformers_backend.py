"""transformers' model and cache, called as its own `generate` calls them."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tgen.benchmark.throughput import Workload
from tgen.config import StoredAs
from tgen.engine.base import Logits
from tgen.errors import UsageError


class Transformers:
    """See `peers.Peer`. A class without a cache (openai-gpt) reads its rows anew at every call."""

    runs_on = "torch"

    def __init__(
        self, path: Path, *, threads: int, stored: StoredAs, tokens: Sequence[int]
    ) -> None:
        """Loads the directory, nothing from the network; raises UsageError for int8."""
        if stored == "int8":
            raise UsageError(
                "transformers holds no int8 weights here", "add --weights float32 or bfloat16"
            )
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        kind = torch.bfloat16 if stored == "bfloat16" else torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True)
        self._model = loaded.eval()
        self._threads, self._tokens = threads, torch.tensor(tokens)
        takes = inspect.signature(self._model.forward).parameters
        self._has_cache = "past_key_values" in takes
        options = {"use_cache": True, "logits_to_keep": 1}
        self._options = {name: value for name, value in options.items() if name in takes}
        self._rows, self._held = 1, 0  # tokens in each row
        self._past: Any = None  # the cache, once there is something to keep
        self._logits: torch.Tensor | None = None

    def prepare(self, test: Workload) -> None:
        """What is there already of the depth stays."""
        torch.set_num_threads(self._threads)  # one number for the whole process
        if test.batch != self._rows or test.n_depth == 0:
            self._rows, self._held, self._past = test.batch, 0, None
        if self._held > test.n_depth and self._past is not None:
            self._past.crop(test.n_depth - self._held)  # below 0: so many are dropped
            self._held = test.n_depth
        if not self._has_cache:
            self._held = test.n_depth
        if self._held < test.n_depth:
            self._read(test.n_depth - self._held)

    def prompt(self, test: Workload) -> None:
        """In one call."""
        self._read(test.n_prompt)

    def step(self) -> None:
        """In one call."""
        self._read(1)

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of keys and values held."""
        if self._past is None:
            return 0
        held = [part for layer in self._past.layers for part in (layer.keys, layer.values)]
        return sum(int(part.nbytes) for part in held)

    def logits(self) -> Logits:
        """(B, V): what the last prompt or step gave."""
        assert self._logits is not None
        found: Logits = self._logits.float().numpy().copy()
        return found

    def close(self) -> None:
        """Lets go of the model and the cache."""
        self._model = self._past = self._logits = None

    @torch.inference_mode()
    def _read(self, n: int) -> None:
        begin, end = self._held if self._has_cache else 0, self._held + n
        tokens = self._tokens[begin:end].expand(self._rows, -1)
        past = {"past_key_values": self._past} if self._has_cache else {}
        out = self._model(tokens, **past, **self._options)
        self._past, self._held = out.get("past_key_values"), end
        self._logits = out.logits[:, -1]
