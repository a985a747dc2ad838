"""A generated token, what samplers removed before it was sampled, the distribution it was sampled
from, a generated text, its rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from tgen.config import SamplingConfig


class RemovedCandidates(NamedTuple):
    """Candidates that one sampler removed before a token was sampled."""

    sampler: str
    candidates: int  # removed
    probability: float  # their total
    left: int  # candidates after the sampler


PENALTIES = "penalties"  # the step before the samplers: penalties, biases, bans and constraints


@dataclass(frozen=True, kw_only=True)
class CandidateProbabilities:
    """A candidate for the next token: its probability before, between and after the samplers."""

    id: int
    text: bytes
    logit: float  # of the model
    probability: float  # of the model
    after: list[float]  # probability after each step
    removed_by: str  # the step that removed it; "": none. XTC removes it in some of the draws
    final: float  # probability of being sampled


@dataclass(frozen=True, kw_only=True)
class SamplingDistribution:
    """The distribution of the next token before and after each sampler.

    With XTC, which acts in some of the draws, `steps` and `removed_by` describe those draws, and
    probabilities are means over all draws.
    """

    steps: list[RemovedCandidates]
    xtc_probability: float  # the share of draws in which XTC acts
    candidates: list[CandidateProbabilities]  # the most likely first


Finish = Literal["stop", "length", "context"]  # end token or stop string, -n, full context


class Token(NamedTuple):
    """One generated token."""

    sequence: int  # number of the request
    id: int
    text: bytes  # text that can be shown now: no part of a possible stop string
    removed: list[RemovedCandidates]  # by the samplers in order, if requested
    finish: Finish | None  # why the sequence ends here
    complete: bool  # False: the sequence ends without satisfying its constraint
    # The following are set if they are requested.
    logprob: float = math.nan  # nats, under the model's own distribution
    rank: int = -1  # 0 is the most likely token
    entropy: float = math.nan  # nats, of that distribution
    top_logprobs: Sequence[tuple[int, float]] = ()  # ids and nats of the most likely tokens

    @property
    def last(self) -> bool:
        """Whether the sequence ends here."""
        return self.finish is not None


class TextDetails:
    """Details of a generated text, up to its newest token.

    A text that was cut before it satisfied its constraint is not `complete`. `tokens` are ids,
    those of end tokens included. `logprobs` (nats) and `top_logprobs` (the most likely ids per
    token) are None unless `logprobs` was set, and `explanations` unless `explain` was.
    """

    seed: int = 0
    finish_reason: Finish | None = None  # None: the text has not ended
    complete: bool = False
    tokens: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    explanations: list[Token] | None

    def start(self, sampling: SamplingConfig) -> Self:
        """Start a text without tokens, which has ended if there can be none."""
        has_ended = sampling.max_new_tokens == 0
        self.seed, self.tokens = sampling.seed, []
        self.finish_reason = "length" if has_ended else None
        self.complete = has_ended and not sampling.constrained
        self.logprobs, self.top_logprobs = ([], []) if sampling.logprobs else (None, None)
        self.explanations = [] if sampling.explain else None
        return self

    def add(self, token: Token) -> None:
        """Add the next token."""
        self.tokens.append(token.id)
        self.finish_reason, self.complete = token.finish, token.last and token.complete
        if self.logprobs is not None and self.top_logprobs is not None:
            self.logprobs.append(token.logprob)
            self.top_logprobs.append(dict(token.top_logprobs))
        if self.explanations is not None:
            self.explanations.append(token._replace(sequence=0))  # not its number in a batch


class Text(str, TextDetails):
    """A generated text: a str that has `TextDetails`, which are lost in strings made from it."""

    def __new__(cls, text: str, details: TextDetails | None = None) -> Self:
        """Return the text; without details it has none."""
        self = super().__new__(cls, text)
        if details is not None:
            vars(self).update(
                {name: getattr(details, name) for name in TextDetails.__annotations__}
            )
        return self


class Rates(NamedTuple):
    """Latency and rates of one text, counted from its request; None: too few tokens to measure."""

    seconds_to_first_token: float | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None


def measure_rates(seconds: Sequence[float], *, prompt_tokens: int, n_tokens: int) -> Rates:
    """Return the rates of a text from the times of its request, its first and its last token."""
    if len(seconds) < 2:
        return Rates()
    began, first, last = seconds[0], seconds[1], seconds[-1]
    return Rates(
        round(first - began, 6),
        round(prompt_tokens / max(first - began, 1e-9), 1),
        round((n_tokens - 1) / (last - first), 1) if last > first else None,
    )
