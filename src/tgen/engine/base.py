"""The interface of all engines: sequences of one model's tokens, extended one or many at a time."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tgen.config import SamplingConfig, StoredAs

if TYPE_CHECKING:
    from tgen.checkpoint.prompt_cache import ModelIdentity

Logits = NDArray[np.float32]  # (B, V)
Floats = NDArray[np.float32]


class PromptCache(NamedTuple):
    """Cached keys and values of a text's first tokens."""

    tokens: list[int]
    keys: Floats  # (L, n_kv_heads, n, D), float32, after rotation
    values: Floats
    model: "ModelIdentity | None" = None  # the model that computed them, if known

    def __repr__(self) -> str:
        return f"PromptCache({len(self.tokens):,} tokens)"


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens that two texts share at their start."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def reset(engine: "Engine", n_sequences: int) -> None:
    """Replace all sequences with `n_sequences` empty ones, at least one."""
    engine.rewind([0] * len(engine.lengths))
    engine.select([0] * n_sequences)


def extended_lengths(
    lengths: Sequence[int], counts: Sequence[int], context_length: int
) -> list[int]:
    """Add `counts` to `lengths`; raise ValueError for a count of 0 or a length over the context."""
    new = [length + count for length, count in zip(lengths, counts, strict=True)]
    if min(counts) < 1 or max(new) > context_length:
        raise ValueError(
            f"cannot append {counts} tokens to sequences of {lengths} tokens "
            f"(context length {context_length})"
        )
    return new


class Engine(Protocol):
    """B sequences of one model, at least one; a new engine has one empty sequence.

    Several threads may call one engine, or engines that share weights: calls run one by one.
    """

    name: str  # "kernels" or "torch"
    dtype: StoredAs  # dtype of the weights in memory
    context_length: int  # maximum tokens per sequence
    vocab_size: int  # ids, and logits of a token

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""

    @property
    def cache_dtype(self) -> str:
        """The dtype of the cached keys and values."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached keys and values."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are not another engine's."""

    def share_weights(self, other: Self) -> None:
        """Use another engine's memory for the weights that are equal bit by bit; before the first
        pass."""

    def clone(self) -> Self:
        """Return an engine with the same weights and one empty sequence."""

    def extend(self, tokens: Sequence[Sequence[int]], *, every_position: bool = False) -> Logits:
        """Append at least one token to each sequence and return float32 logits.

        Prefill, decoding steps and the verification of draft tokens all use this call. Returns the
        logits after the last token of each sequence, (B, V), or after every new token, sequence
        after sequence, (sum of counts, V). Raises ValueError if a sequence would exceed the
        context.
        """

    def continue_text(
        self, token: int, n: int, sampling: SamplingConfig, *, position: int
    ) -> list[int]:
        """Append a token, sample the next one, append that one and so on, up to `n` times; return
        the sampled tokens, of which the last one is not appended.

        They are the tokens that `extend` and `generation.sample` give. The list is empty, and
        nothing is appended, if there are several sequences, or if this engine or the settings need
        the logits in Python. `position` is that of the first sample.
        """

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate sequence i to lengths[i] tokens, if it is longer."""

    def select(self, indices: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Select, repeat and reorder sequences: new sequence i is old sequence indices[i], or its
        first lengths[i] tokens. Raises ModelError, and changes nothing, if they do not fit."""

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raise ModelError unless the memory has room for sequences of these numbers of tokens, the
        present ones among them."""

    def keys_and_values(self) -> tuple[Floats, Floats]:
        """Return the first sequence's keys and values, each (L, n_kv_heads, n, D)."""

    def restore(self, keys: Floats, values: Floats) -> None:
        """Replace everything with one sequence that has these keys and values."""


class CachingEngine:
    """The methods that all engines have in common: their sequences are in a `_cache`, which a
    `_lock` guards."""

    _cache: Any
    _lock: threading.Lock

    def continue_text(self, *_: Any, **__: Any) -> list[int]:
        """Return no tokens: see `Engine`."""
        return []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return list(self._cache.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cached keys and values."""
        return int(self._cache.used_bytes)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence."""
        with self._lock:
            self._cache.rewind(lengths)

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raise ModelError unless sequences of these lengths fit; see `Engine`."""
        self._cache.check_room(lengths)
