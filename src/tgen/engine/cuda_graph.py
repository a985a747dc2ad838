"""A decoding step as a CUDA graph: launching hundreds of small kernels takes most of the time.

A graph repeats the same work on the same memory. A step therefore has its tokens and positions in
fixed tensors, writes keys and values by position, and attends over the whole capacity of the cache,
with a mask. Steps that verify drafts are padded to a power of two, and each has its own graph. A
graph is captured after some steps on the same cache, and used only if its first logits match those
of the step without it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tgen.engine.cuda_attention import use_step_kernels
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
    """A view of a KVCache's storage for T more tokens per sequence, with fixed shapes: as if every
    sequence filled the storage, and with the tokens' `positions` in a tensor.

    A sequence with fewer tokens is padded: later tokens replace the padding before any sees it.
    """

    def __init__(self, cache: KVCache, n_new: int) -> None:
        self.keys, self.values = cache.keys, cache.values
        n_rows, device = cache.n_stored, self.keys[0].device  # also those without a sequence
        self.lengths = self._start = [cache.capacity] * n_rows
        self.positions = torch.zeros(n_rows, n_new, dtype=torch.long, device=device)
        self._positions = self.positions

    def extend(self, n_new: int) -> Tensor:
        """Return the positions (B, T)."""
        assert n_new == self.positions.shape[1]
        return self.positions


class GraphedStep:
    """Steps of up to `width` tokens per sequence, of one model and cache, as a CUDA graph if
    possible."""

    def __init__(self, model: Transformer, cache: KVCache, width: int) -> None:
        self._model, self.cache, self._width = model, cache, width
        self._memory: Tensor | None = None  # storage of the last steps
        self._view: StepCache | None = None
        self._n_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed = False  # the graph's logits differed: do not try again

    @property
    def has_room(self) -> bool:
        """Whether every sequence, padded, fits the context."""
        return max(self.cache.lengths) + self._width <= self.cache.context_length

    def forget_old_storage(self) -> None:
        """Drop the graph if the cache has new storage, so that the old one is freed."""
        if self._memory is not self.cache.keys[0]:
            self._memory = self._graph = self._view = None

    def step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to each sequence; return logits after each, (sum of counts, V)."""
        self.cache.reserve(max(self.cache.lengths) + self._width)
        if self._view is None or self._memory is not self.cache.keys[0]:
            self._memory, self._n_steps, self._graph = self.cache.keys[0], 0, None
            self._view = StepCache(self.cache, self._width)
            self._tokens = torch.zeros_like(self._view.positions)
        self._n_steps += 1
        padded = [[*new, *[0] * (self._width - len(new))] for new in tokens]
        first = torch.tensor(self.cache.lengths)[:, None]
        self._tokens[: len(tokens)].copy_(torch.tensor(padded))
        self._view.positions[: len(tokens)].copy_(first + torch.arange(self._width))
        counts = [len(new) for new in tokens]
        self.cache.lengths = [old + n for old, n in zip(self.cache.lengths, counts, strict=True)]
        logits = self._run().flatten(0, 1)  # (B * T, V)
        if self._width == 1:
            return logits[: len(tokens)]
        return logits[[row * self._width + i for row, n in enumerate(counts) for i in range(n)]]

    def _run(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            return self._logits
        logits = self._compute()
        on_gpu = logits.device.type == "cuda"
        if on_gpu and self._n_steps == _STEPS_BEFORE_CAPTURE and not self._failed:
            try:
                self._capture(logits)
            except RuntimeError:  # out of memory, or an operation that cannot be captured
                self._failed = True
        return logits

    def _compute(self) -> Tensor:
        keys = self.cache.keys[0]
        with use_step_kernels(keys.device, keys.dtype):
            x = self._model.hidden_states(self._tokens, cache=self._view)
        return self._model.logits(x)

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
