"""Scores of texts: how well models predict them."""

import math
from dataclasses import dataclass
from typing import Literal

Unit = Literal["documents", "blocks"]  # parts of the text whose scores vary independently


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """One token of a document, and how well the model predicted it."""

    position: int  # in the document, from 0
    id: int
    text: bytes
    logprob: float  # nats
    rank: int  # 0: the most likely token
    context: int  # number of tokens that it was predicted from


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of a model on a document, or on all of them."""

    n_bytes: int  # of the text whose tokens are scored
    n_tokens: int  # scored
    nats: float  # negative log-likelihood of all of them
    standard_error: float | None  # of the bits per byte; None: fewer than 10 units
    unit: Unit
    n_units: int

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text; None without a byte."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else None

    @property
    def perplexity(self) -> float | None:
        """Perplexity per token, infinite if no float is as large; None without a token."""
        if not self.n_tokens:
            return None
        mean = self.nats / self.n_tokens
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class ScoreDifference:
    """The bits per byte of a model minus those of another on the same text."""

    bits_per_byte: float  # negative: the first model predicts the text better
    standard_error: float | None  # of the paired difference; None: fewer than 10 units
    p_value: float | None  # two-sided, of a paired permutation test; None: fewer than 10 units
    unit: Unit
    n_units: int

    @property
    def is_significant(self) -> bool:
        """Whether equally good models differ as much with a probability below 5%."""
        return self.p_value is not None and self.p_value < 0.05


@dataclass(frozen=True, kw_only=True)
class ScoreReport:
    """The score of one or two models on a text."""

    score: Score
    other: Score | None  # of the second model
    difference: ScoreDifference | None  # None also without a byte


@dataclass(frozen=True, kw_only=True)
class DocumentReport(ScoreReport):
    """The scores of a document."""

    name: str


@dataclass(frozen=True, kw_only=True)
class TotalReport(ScoreReport):
    """The scores of all documents together."""

    n_documents: int
    n_replaced: int  # characters that a tokenizer cannot express, replaced by U+FFFD
    n_normalized: int  # documents whose text a tokenizer changes
    n_cut: int  # conversations of which some answers do not fit the context
