"""A generated token and what the samplers did before it was drawn."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Removed(NamedTuple):
    """What one sampler took away before a token was drawn."""

    sampler: str
    candidates: int
    probability: float  # that they had together
    left: int  # candidates


Finish = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One generated token."""

    row: int
    id: int
    text: bytes  # what can be shown now: nothing of what may become a stop string
    logprob: float  # nats, under the model's own distribution
    rank: int  # 0: the most likely
    entropy: float  # nats, of that distribution
    likeliest: list[tuple[int, float]]  # ids and nats, as many as were asked for
    removed: list[Removed]  # in order, where that was asked for
    finish: Finish | None  # why the row ends here: by itself, at its length, at the context's
    complete: bool  # False: the text ends, and is not of its form or could not go on as it must

    @property
    def last(self) -> bool:
        """Whether the row ends here."""
        return self.finish is not None
