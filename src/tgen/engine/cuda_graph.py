"""A decoding step as a CUDA graph: launching hundreds of small kernels takes most of the time.

A graph repeats the same work on the same memory. A step therefore has its tokens and positions in
fixed tensors, writes keys and values by position, and attends over the whole capacity of the cache,
with a mask. The graph is captured after some steps on the same cache, and used only if its first
logits match those of the step without it.
"""

import torch
from torch import Tensor

from tgen.engine.cuda_attention import use_step_kernels
from tgen.model.attention import causal_mask
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer

_STEPS_BEFORE_CAPTURE = 8  # on the same memory
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


class StepCache(KVCache):
    """A view of a KVCache's storage for one more token per sequence, with fixed shapes."""

    def __init__(self, cache: KVCache) -> None:
        self.keys, self.values = cache.keys, cache.values
        self.capacity = cache.capacity
        n_rows, device = cache.n_stored, self.keys[0].device  # also those without a sequence
        self.position = torch.zeros(n_rows, 1, dtype=torch.long, device=device)

    def extend(self, n_new: int) -> Tensor:
        """Return the positions (B, 1)."""
        assert n_new == 1
        return self.position

    def mask(self, window: int | None) -> Tensor:
        """Return the attention mask (B, 1, 1, S)."""
        return causal_mask(self.position, self.capacity, window)[:, None]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, n_kv_heads, 1, D); return the whole storage (B, n_kv_heads, S, D)."""
        keys, values = self.keys[layer], self.values[layer]
        index = self.position[:, None, :, None].expand_as(k)
        keys.scatter_(2, index, k.to(keys.dtype))
        values.scatter_(2, index, v.to(values.dtype))
        return keys[:, :, : self.capacity], values[:, :, : self.capacity]


class GraphedStep:
    """Decoding steps of one model and cache, as a CUDA graph if possible."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self.cache = model, cache
        self._memory: Tensor | None = None  # storage of the last steps
        self._view: StepCache | None = None
        self._n_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed = False  # the graph's logits differed: do not try again

    def forget_old_storage(self) -> None:
        """Drop the graph if the cache has new storage, so that the old one is freed."""
        if self._memory is not self.cache.keys[0]:
            self._memory = self._graph = self._view = None

    def step(self, tokens: list[int]) -> Tensor:
        """Append a token to each sequence; return logits (B, V)."""
        self.cache.reserve(max(self.cache.lengths) + 1)
        if self._view is None or self._memory is not self.cache.keys[0]:
            self._memory, self._n_steps, self._graph = self.cache.keys[0], 0, None
            self._view = StepCache(self.cache)
            self._tokens = torch.zeros_like(self._view.position)
        self._n_steps += 1
        n = len(tokens)
        self._tokens[:n].copy_(torch.tensor(tokens)[:, None])
        self._view.position[:n].copy_(torch.tensor(self.cache.lengths)[:, None])
        self.cache.lengths = [length + 1 for length in self.cache.lengths]
        if self._graph is not None:
            self._graph.replay()
            return self._logits[:n]
        logits = self._compute()
        on_gpu = logits.device.type == "cuda"
        if on_gpu and self._n_steps == _STEPS_BEFORE_CAPTURE and not self._failed:
            try:
                self._capture(logits)
            except RuntimeError:  # out of memory, or an operation that cannot be captured
                self._failed = True
        return logits[:n]

    def _compute(self) -> Tensor:
        keys = self.cache.keys[0]
        with use_step_kernels(keys.device, keys.dtype):
            x = self._model.hidden_states(self._tokens, cache=self._view)
        return self._model.logits(x[:, -1])

    def _capture(self, expected: Tensor) -> None:
        """Capture a step that has just run: repeating it writes the same numbers."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # CUDA requires a warmup on a side stream
            self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._tables = list(self._model.buffers())  # read by the graph even if they are replaced
        with torch.cuda.graph(graph):
            self._logits = self._compute()
        graph.replay()
        difference = float((self._logits.float() - expected.float()).abs().max())
        if difference <= _TOLERANCE[self.cache.keys[0].dtype] * float(expected.abs().max()):
            self._graph = graph
        else:
            self._failed = True
