"""A generated token, and what the samplers removed before it was sampled."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class RemovedCandidates(NamedTuple):
    """Candidates that one sampler removed before a token was sampled."""

    sampler: str
    candidates: int  # removed
    probability: float  # their total
    left: int  # candidates after the sampler


Finish = Literal["stop", "length", "context"]  # end token or stop string, -n, full context


@dataclass(frozen=True, kw_only=True)
class Token:
    """One generated token."""

    sequence: int  # number of the request
    id: int
    text: bytes  # text that can be shown now: no part of a possible stop string
    logprob: float  # nats, under the model's own distribution
    rank: int  # 0 is the most likely token
    entropy: float  # nats, of that distribution
    top_logprobs: list[tuple[int, float]]  # ids and nats of the most likely tokens, if requested
    removed: list[RemovedCandidates]  # by the samplers in order, if requested
    finish: Finish | None  # why the sequence ends here
    complete: bool  # False: the sequence ends without satisfying its constraint

    @property
    def last(self) -> bool:
        """Whether the sequence ends here."""
        return self.finish is not None
