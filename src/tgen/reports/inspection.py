"""What is seen inside a model. Matrices are NumPy float32: a text of 1,024 tokens has a million."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
CLEAR = 0.3  # so far above what would be there anyway a score is a role; for sinks Gu et al. 2024's


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionReport:
    """One head's attention over a text, or the mean over all heads of a layer."""

    layer: int
    head: int | None  # None: the mean
    kv_head: int | None  # whose keys and values it uses
    weights: Matrix  # (T, T): row i is query i over the keys; each sums to 1, keys after i are 0
    measure: Literal["attention", "value"]  # "value": what each key adds, as a share of the row
    why: str  # how layer and head came to be shown; "": they were asked for


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """What one head does, over the rows of a text but the first (which sees only itself)."""

    layer: int
    head: int
    kv_head: int
    role: str  # the plainest thing that it does, or ""
    entropy: float  # nats, mean over queries
    effective_keys: float  # exp(entropy), mean over queries
    normalised_entropy: float  # entropy / ln(keys in sight); uniform attention has 1
    confidence: float  # the largest weight, mean over queries
    distance: float  # tokens back, mean
    self: float  # weight on the query's own position, mean; so the next ones
    previous: float
    first: float  # on the first token; over all rows, as attention sinks are counted
    text_induction: float | None  # on what followed the same token before; None: none came twice
    duplicate: float | None  # on the token's earlier copy in repeated random text; None: no room
    duplicate_control: float | None  # the same places where nothing was repeated
    induction: float | None  # on what followed the earlier copy
    induction_control: float | None
    induction_deviation: float | None  # standard deviation over the seeds
    by_distance: list[float]  # mass 0, 1, 2-3, 4-7, ... tokens back; sums to 1
    ablation: float | None  # nats a token that the text costs more without it; None: not asked for


@dataclass(frozen=True, kw_only=True)
class HeadsReport:
    """Every head, and what uniform attention would score."""

    heads: list[HeadReport]
    baseline: dict[str, float]  # by the fields of HeadReport
    n_rows: int  # queries that were averaged
    block_length: int  # of the random text that was repeated; 0: there was no room
    seeds: int
    drawn_from: str  # which tokens that random text was made of
    same_tokens: bool  # whether the control has the same ones, in another order
    repeat_gain: float | None  # nats a token that the second copy costs less than the control
    loss: float | None  # nats a token of the text, where heads were ablated


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A candidate for the next token."""

    id: int
    text: bytes
    probability: float
    logit: float


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """A token of the text, and how the model saw it coming."""

    index: int
    id: int
    text: bytes
    start: int  # its first byte in the text
    surprisal: float | None  # bits; None: the first, which nothing comes before
    rank: int | None  # 0: the model's first choice
    likeliest: int | None  # the model's first choice
    likeliest_text: bytes | None
    likeliest_probability: float | None


@dataclass(frozen=True, kw_only=True)
class TextReport:
    """A text, token by token, and what it costs."""

    tokens: list[TokenReport]
    n_bytes: int
    nats_per_token: float | None  # None: a single token
    perplexity: float | None
    bits_per_byte: float | None  # over the bytes that were predicted


@dataclass(frozen=True, kw_only=True, eq=False)
class LensReport:
    """What the model would say if it stopped after each layer (the logit lens)."""

    layers: list[str]  # "embedding", then a name a layer
    first: int  # the first position shown
    likeliest: list[list[int]]  # token ids by layer and position
    likeliest_text: list[list[bytes]]
    probabilities: Matrix  # (layers, positions) of those
    query: int
    candidates: list[list[Prediction]]  # by layer, at `query`
    answer: int  # the last layer's first choice at `query`
    answer_text: bytes
    ranks: list[int]  # of the answer, by layer
    answer_probabilities: list[float]


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What one part of the model adds to a logit."""

    part: str
    layer: int | None
    head: int | None
    logit: float


@dataclass(frozen=True, kw_only=True)
class WhyReport:
    """A logit taken apart (direct logit attribution)."""

    query: int
    target: int
    target_text: bytes
    probability: float
    logit: float
    parts: list[Contribution]  # the largest first; they sum to the logit
    difference: float  # between that sum and the logit


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutReport:
    """Which tokens could have fed each position after a layer (attention rollout)."""

    layer: int
    weights: Matrix  # (T, T), as in AttentionReport


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionsReport:
    """How the model tells positions apart."""

    kind: Literal["sinusoidal", "learned", "similarity", "rotary"]
    title: str
    values: Matrix  # (rows, columns), from -1 to 1 but for "learned"
    row_name: str
    column_name: str
    rows: list[str]
    columns: list[str]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that must hold for what is shown to be what the model does."""

    name: str
    value: float  # how far it is from holding exactly
    limit: float
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is near enough."""
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What a model is made of."""

    path: str
    family: str
    fields: dict[str, Any]  # the configuration
    parameters: list[tuple[str, list[int], int, str]]  # name, shape, count, dtype
    n_parameters: int
    n_embedding_parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    attention_bytes: int  # one layer's weights over a whole context, float32
    found_by: str = ""  # the rule by which its name meant this path; "": unknown
