"""The reference engine: the torch model and its KV cache, on any device.

With bfloat16 matrices, autocast computes products in bfloat16; norms and rotary tables stay
float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tgen.config import StoredAs
from tgen.engine.base import Floats, Logits, extended_lengths
from tgen.engine.cuda_graph import GraphedStep
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer


class TorchEngine:
    """See `engine.base.Engine`."""

    name = "torch"

    def __init__(self, model: Transformer, *, dtype: StoredAs = "float32") -> None:
        self.model = model.eval()
        self.context_length = model.config.context_length
        self.dtype: StoredAs = dtype
        narrow = dtype == "bfloat16"
        if narrow:  # norms, biases and position tables stay float32
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data = parameter.data.bfloat16()
        weight = model.token_embedding.weight
        self.device = weight.device
        self._autocast = torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=narrow,
            cache_enabled=False,  # a CUDA graph must not read casts that will be freed
        )
        self._cache = KVCache(model.config, 1, device=weight.device, dtype=weight.dtype)
        self._graphed_step = GraphedStep(model, self._cache)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return list(self._cache.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached keys and values."""
        return self._cache.used_bytes

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]], *, every_position: bool = False) -> Logits:
        """Append tokens to each sequence; see `engine.base.Engine.extend`."""
        counts = [len(new) for new in tokens]
        after = extended_lengths(self.lengths, counts, self.context_length)
        if self.device.type == "cuda" and max(counts) == 1 and not every_position:
            return self.step([new[0] for new in tokens])
        # Padding comes last, so that no real token sees it; `rewind` removes it.
        padded = [[*new, *[0] * (max(counts) - len(new))] for new in tokens]
        with self._autocast:
            ids = torch.tensor(padded, device=self.device)
            x = self.model.hidden_states(ids, cache=self._cache)  # (B, T, C)
            self._cache.rewind(after)
            if every_position:
                x = torch.cat([x[i, :n] for i, n in enumerate(counts)])  # (N, C)
            else:
                last = torch.tensor(counts, device=self.device) - 1
                x = x[torch.arange(len(counts), device=self.device), last]  # (B, C)
            return _to_numpy(self.model.logits(x))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        """Append one token to each sequence, with fixed shapes: see `GraphedStep`."""
        with self._autocast:
            return _to_numpy(self._graphed_step.step(list(tokens)))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence."""
        self._cache.rewind(list(lengths))

    def select(self, indices: Sequence[int]) -> None:
        """Select, repeat and reorder sequences."""
        self._cache.select(list(indices))
        self._graphed_step.forget()

    def keys_and_values(self) -> tuple[Floats, Floats]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        keys, values = self._cache.first_sequence()
        return keys.float().cpu().numpy(), values.float().cpu().numpy()

    def restore(self, keys: Floats, values: Floats) -> None:
        """Replace everything with one sequence that has these keys and values."""
        self._cache.restore(torch.from_numpy(keys), torch.from_numpy(values))
        self._graphed_step.forget()


def _to_numpy(logits: Tensor) -> Logits:
    array: Logits = logits.float().cpu().numpy()
    return array
