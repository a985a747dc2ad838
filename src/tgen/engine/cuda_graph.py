"""One token for every row as a CUDA graph: a small model's step is hundreds of kernels, and what
takes time is to ask for each of them.

A graph repeats the same work on the same memory. So a step has its tokens and positions in fixed
tensors, writes keys and values by position, and attends over all the room that the cache has, with
a mask. A graph is taken once the same cache has been stepped a few times, and its first answer must
be that of the step without it.
"""

import torch
from torch import Tensor

from tgen.model.attention_mask import causal_mask
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer

_STEPS_BEFORE = 8  # with the same memory, before a graph is worth its making
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


class StepCache(KVCache):
    """A KVCache's memory, for one more token in every row. It never changes its shape."""

    def __init__(self, cache: KVCache) -> None:
        self.keys, self.values, self.window = cache.keys, cache.values, cache.window
        rows, capacity = self.keys[0].shape[0], self.keys[0].shape[2]
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=self.keys[0].device)
        self._capacity = capacity

    def extend(self, n_new: int) -> tuple[Tensor, Tensor]:
        """The positions, (B, 1), and whom they see, (B, 1, 1, S)."""
        assert n_new == 1
        return self.position, causal_mask(self.position, self._capacity, self.window)[:, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, n_kv_heads, 1, D); gives all the room, (B, n_kv_heads, S, D)."""
        keys, values = self.keys[layer], self.values[layer]
        index = self.position[:, None, :, None].expand_as(k)
        keys.scatter_(2, index, k.to(keys.dtype))
        values.scatter_(2, index, v.to(values.dtype))
        return keys, values


class GraphedStep:
    """Steps of one model and cache; as a graph where that can be had."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self.cache = model, cache
        self._memory: Tensor | None = None  # that the last steps worked on
        self._view: StepCache | None = None
        self._n_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed = False  # graphs and steps did not agree: no more of them

    def forget(self) -> None:
        """The cache has other memory now: what worked on the old may be freed."""
        self._memory = self._graph = self._view = None

    def step(self, tokens: list[int]) -> Tensor:
        """Appends a token to each row; logits (B, V) of what follows."""
        self.cache.reserve(max(self.cache.lengths) + 1)
        if self._view is None or self._memory is not self.cache.keys[0]:
            self._memory, self._n_steps, self._graph = self.cache.keys[0], 0, None
            self._view = StepCache(self.cache)
            self._tokens = torch.zeros_like(self._view.position)
        self._n_steps += 1
        self._tokens.copy_(torch.tensor(tokens)[:, None])
        self._view.position.copy_(torch.tensor(self.cache.lengths)[:, None])
        self.cache.lengths = [n + 1 for n in self.cache.lengths]
        if self._graph is not None:
            self._graph.replay()
            return self._logits
        logits = self._compute()
        on_gpu = logits.device.type == "cuda"
        if on_gpu and self._n_steps == _STEPS_BEFORE and not self._failed:
            try:
                self._capture(logits)
            except RuntimeError:  # no memory for it, or a part that cannot be captured
                self._failed = True
        return logits

    def _compute(self) -> Tensor:
        return self._model.logits(self._model.hidden(self._tokens, cache=self._view)[:, -1])

    def _capture(self, wanted: Tensor) -> None:
        """Takes the graph of a step that has just been made: it writes the same again."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as CUDA wants it before a capture
            self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._compute()
        graph.replay()
        difference = float((self._logits.float() - wanted.float()).abs().max())
        if difference <= _TOLERANCE[self.cache.keys[0].dtype] * float(wanted.abs().max()):
            self._graph = graph
        else:
            self._failed = True
