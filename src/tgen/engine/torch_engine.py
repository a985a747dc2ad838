"""The reference engine: the torch model and its cache, on any device.

Matrices may be bfloat16: then products are, by autocast, and norms and turned positions float32.
"""

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from tgen.config import StoredAs
from tgen.engine.base import Floats, Logits, lengths_after
from tgen.engine.cuda_graph import GraphedStep
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer


class TorchEngine:
    """See `engine.base.Engine`."""

    name = "torch"

    def __init__(self, model: Transformer, *, stored: StoredAs = "float32") -> None:
        self.model = model.eval()
        self.stored: StoredAs = stored
        narrow = stored == "bfloat16"
        if narrow:  # norms, biases and the fixed tables of positions stay float32
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data = parameter.data.bfloat16()
        weight = model.token_embedding.weight
        self.device = weight.device
        self._autocast = torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=narrow,
            cache_enabled=False,  # a graph must not read casts that will be freed
        )
        self._cache = KVCache(model.config, 1, device=weight.device, dtype=weight.dtype)
        self._stepper = GraphedStep(model, self._cache)

    @property
    def context_length(self) -> int:
        """Tokens that a row can hold."""
        return self.model.config.context_length

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        return list(self._cache.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return self._cache.bytes_held

    @overload
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: Literal[False] = False
    ) -> Logits: ...
    @overload
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: Literal[True]
    ) -> list[Logits]: ...
    @torch.inference_mode()
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: bool = False
    ) -> Logits | list[Logits]:
        """Appends tokens to each row; logits (B, V) of what follows, or a list of (t_i, V)."""
        counts = [len(row) for row in tokens]
        after = lengths_after(self.lengths, counts, self.context_length)
        if self.device.type == "cuda" and max(counts) == 1 and not every_position:
            return self.step([row[0] for row in tokens])
        # Shorter rows are padded behind: no real token sees the padding, and it is forgotten.
        padded = [list(row) + [0] * (max(counts) - len(row)) for row in tokens]
        with self._autocast:
            ids = torch.tensor(padded, device=self.device)
            x = self.model.hidden(ids, cache=self._cache)  # (B, T, C)
            self._cache.rewind(after)
            if every_position:
                real = torch.cat([x[row, :n] for row, n in enumerate(counts)])
                return np.split(_on_host(self.model.logits(real)), np.cumsum(counts)[:-1])
            last = torch.tensor(counts, device=self.device) - 1
            rows = torch.arange(len(counts), device=self.device)
            return _on_host(self.model.logits(x[rows, last]))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        """As `extend` with a token for each row, in work of a fixed shape: see captured_step.py."""
        with self._autocast:
            return _on_host(self._stepper.step(list(tokens)))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tail."""
        self._cache.rewind(list(lengths))

    def select(self, rows: Sequence[int]) -> None:
        """Keeps, repeats and reorders rows."""
        self._cache.select(list(rows))
        self._stepper.forget()

    def keys_and_values(self) -> tuple[Floats, Floats]:
        """Those that the first row holds, each (L, n_kv_heads, n, D)."""
        keys, values = self._cache.first_row()
        return keys.float().cpu().numpy(), values.float().cpu().numpy()

    def restore(self, keys: Floats, values: Floats) -> None:
        """Leaves one row, which holds these."""
        self._cache.restore(torch.from_numpy(keys), torch.from_numpy(values))
        self._stepper.forget()


def _on_host(logits: Tensor) -> Logits:
    found: Logits = logits.float().cpu().numpy()
    return found
