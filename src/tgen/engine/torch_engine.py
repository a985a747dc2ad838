"""The reference engine: the torch model and its KV cache, on any device.

With bfloat16 or float16 matrices, autocast computes products in their dtype; norms and rotary
tables stay float32.
"""

import threading
from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn

from tgen.config import StoredAs
from tgen.engine.base import CachingEngine, Floats, Logits, extended_lengths
from tgen.engine.cuda_attention import use_pass_kernels
from tgen.engine.cuda_graph import GraphedStep
from tgen.model.kv_cache import KVCache, PaddedRows
from tgen.model.transformer import Transformer

# Padding, in tokens, that costs as much as one more pass, which reads all weights.
_CPU_PASS_COST, _GPU_PASS_COST = 16, 256
_STEP_WIDTHS = (1, 2, 4, 8, 16)  # tokens per sequence: a token, or with its drafts

_gpu_locks: dict[torch.device, threading.Lock] = {}


def get_graph_lock(device: torch.device) -> threading.Lock:
    """Return the lock that all engines of a GPU share; a new one for any other device.

    Nothing else may run or be loaded on a GPU while a graph is captured.
    """
    if device.type != "cuda":
        return threading.Lock()
    return _gpu_locks.setdefault(torch.device("cuda", device.index or 0), threading.Lock())


class TorchEngine(CachingEngine):
    """See `engine.base.Engine`."""

    name = "torch"
    _cache: KVCache

    def __init__(
        self,
        model: Transformer,
        *,
        dtype: StoredAs = "float32",
        device: torch.device | None = None,
    ) -> None:
        """Compute with the model, on `device` if given."""
        self.model = model.eval()
        self.context_length = model.config.context_length
        self.vocab_size = model.config.vocab_size
        self.dtype: StoredAs = dtype
        self.cache_dtype = dtype
        self.device = device or model.token_embedding.weight.device
        self._lock = get_graph_lock(self.device)
        narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
        with self._lock:
            if narrow is not None:  # before it moves: a GPU never holds the matrices in float32
                for parameter in model.parameters():
                    if parameter.ndim > 1:  # norms, biases and position tables stay float32
                        parameter.data = parameter.data.to(narrow)
            if device is not None:
                model.to(device)
        self._autocast = torch.autocast(
            self.device.type,
            narrow,
            enabled=narrow is not None,
            cache_enabled=False,  # a CUDA graph must not read casts that will be freed
        )
        self._pass_cost = _CPU_PASS_COST if self.device.type == "cpu" else _GPU_PASS_COST
        self._shared: set[int] = set()  # addresses of weights of another engine
        self._start_empty()

    def _start_empty(self) -> None:
        weight = self.model.token_embedding.weight
        dtype = weight.dtype if isinstance(weight, nn.Parameter) else torch.float32  # frozen ones
        with self._lock:
            self._cache = KVCache(self.model.config, 1, device=self.device, dtype=dtype)
        self._graphed_steps = {
            width: GraphedStep(self.model, self._cache, width) for width in _STEP_WIDTHS
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are not another engine's."""
        return sum(p.nbytes for p in self.model.parameters() if p.data_ptr() not in self._shared)

    def share_weights(self, other: Self) -> None:
        """Use another engine's memory for equal weights; see `engine.base.Engine`."""
        theirs = dict(other.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            same = theirs.get(name)
            if same is None or (same.shape, same.dtype) != (parameter.shape, parameter.dtype):
                continue
            with self._lock:
                if torch.equal(same, parameter):
                    parameter.data = same.data
                    self._shared.add(same.data_ptr())

    def clone(self) -> Self:
        """Return an engine with the same weights and one empty sequence."""
        other = copy(self)
        other._start_empty()
        return other

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]], *, every_position: bool = False) -> Logits:
        """Append tokens to each sequence; see `engine.base.Engine.extend`."""
        with self._lock, self._autocast:
            counts = [len(new) for new in tokens]
            extended_lengths(self.lengths, counts, self.context_length)
            if not every_position and len(group_by_count(counts, self._pass_cost)) > 1:
                self._hidden_states([new[:-1] for new in tokens])
                tokens, counts = [new[-1:] for new in tokens], [1] * len(tokens)
            width = 1 << (max(counts) - 1).bit_length()
            step = self._graphed_steps.get(width) if every_position or width == 1 else None
            if self.device.type == "cuda" and step is not None and step.has_room:
                return _to_numpy(step.step(tokens))
            x = self._hidden_states(tokens)
            rows = torch.cat(x) if every_position else torch.stack([part[-1] for part in x])
            return _to_numpy(self.model.logits(rows))

    @torch.inference_mode()
    def select(self, indices: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Select, repeat and reorder sequences."""
        with self._lock:
            self._cache.select(list(indices))
            if lengths is not None:
                self._cache.rewind(lengths)
            self._forget_old_storage()

    def _forget_old_storage(self) -> None:
        for step in self._graphed_steps.values():
            step.forget_old_storage()

    def keys_and_values(self) -> tuple[Floats, Floats]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""
        with self._lock:
            keys, values = self._cache.first_sequence()
            return keys.float().cpu().numpy(), values.float().cpu().numpy()

    @torch.inference_mode()
    def restore(self, keys: Floats, values: Floats) -> None:
        """Replace everything with one sequence that has these keys and values."""
        with self._lock:
            self._cache.restore(torch.from_numpy(keys), torch.from_numpy(values))
            self._forget_old_storage()

    def _hidden_states(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append tokens, or none, to each sequence; return the hidden states (n_i, C) of each."""
        hidden = [torch.empty(0)] * len(tokens)
        cache = self._cache
        for rows in group_by_count([len(new) for new in tokens], self._pass_cost):
            counts = [len(tokens[row]) for row in rows]
            longest = max(counts)
            ids = [
                [*tokens[row], *[0] * (longest - n)] for row, n in zip(rows, counts, strict=True)
            ]
            alike = len(rows) == len(cache.lengths) and min(counts) == longest
            view = cache if alike else PaddedRows(cache, rows, counts)
            with use_pass_kernels(self.device):
                x = self.model.hidden_states(torch.tensor(ids, device=self.device), cache=view)
            for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
                hidden[row] = x[i, :n]
                if not alike:
                    cache.lengths[row] += n
        return hidden


def group_by_count(counts: Sequence[int], pass_cost: int) -> list[list[int]]:
    """Group sequences by their number of new tokens; one padded pass computes each group.

    Returns indices, without those of sequences that get no token. The grouping
    minimizes the number of tokens, including padding, plus `pass_cost` per group.
    """
    sizes = sorted(set(counts) - {0})
    n_up_to = [0, *accumulate(counts.count(size) for size in sizes)]
    best = [(0, 0)]  # best[k]: cost of the first k sizes, and where the last group starts
    for k, longest in enumerate(sizes, start=1):
        costs = (best[i][0] + pass_cost + longest * (n_up_to[k] - n_up_to[i]) for i in range(k))
        best.append(min((cost, i) for i, cost in enumerate(costs)))
    groups, k = [], len(sizes)
    while k:
        first, longest = best[k][1], sizes[k - 1]
        groups.append([i for i, n in enumerate(counts) if sizes[first] <= n <= longest])
        k = first
    return groups


def _to_numpy(logits: Tensor) -> Logits:
    array: Logits = logits.float().cpu().numpy()
    return array
