"""What every engine promises: rows of one model's text, extended token by token or many at once."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from tgen.config import StoredAs

Logits = NDArray[np.float32]  # (B, V)
Floats = NDArray[np.float32]


class PromptCache(NamedTuple):
    """The keys and values of a text's first tokens, which need not be computed again."""

    tokens: list[int]
    keys: Floats  # (L, n_kv_heads, n, D), float32, after the rotation
    values: Floats


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def reset(engine: "Engine", n_rows: int) -> None:
    """Leaves `n_rows` empty rows, at least one."""
    engine.rewind([0] * len(engine.lengths))
    engine.select([0] * n_rows)


def lengths_after(before: Sequence[int], counts: Sequence[int], context_length: int) -> list[int]:
    """How long rows become; raises ValueError if one takes nothing or passes the context."""
    after = [held + new for held, new in zip(before, counts, strict=True)]
    if min(counts) < 1 or max(after) > context_length:
        raise ValueError(
            f"rows of {before} tokens cannot take {counts} more in a context of {context_length}"
        )
    return after


class Engine(Protocol):
    """B rows of one model, never none. Starts with one empty row; `select` makes more."""

    name: str  # "kernels" or "torch"
    stored: StoredAs  # how the weights are held

    @property
    def context_length(self) -> int:
        """Tokens that a row can hold."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values held."""

    @overload
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: Literal[False] = False
    ) -> Logits: ...
    @overload
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: Literal[True]
    ) -> list[Logits]: ...
    def extend(
        self, tokens: Sequence[Sequence[int]], *, every_position: bool = False
    ) -> Logits | list[Logits]:
        """Appends at least one token to each row; the logits of what follows.

        Gives (B, V), after the last new token of each row, or for every new token a list of
        (t_i, V). float32. Prefill, one decoding step and the checking of drafts are this one verb.
        Raises ValueError if a row would pass the context.
        """

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets each row's tail: row i then holds at most lengths[i] tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keeps, repeats and reorders rows: new row i is old row rows[i]."""

    def keys_and_values(self) -> tuple[Floats, Floats]:
        """Those that the first row holds, each (L, n_kv_heads, n, D)."""

    def restore(self, keys: Floats, values: Floats) -> None:
        """Leaves one row, which holds these."""
