"""Reports of `tgen inspect`. Matrices are NumPy float32: 1,024 tokens have a million weights."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
# A head has a role if its score exceeds the baseline by this much (for sinks: Gu et al. 2024).
ROLE_THRESHOLD = 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionReport:
    """Attention weights of one head over a text, or their mean over the heads of a layer."""

    layer: int
    head: int | None  # None: the mean over the heads
    kv_head: int | None  # index of the key/value head it uses; None for the mean
    window: int | None  # keys visible to a query, its own included; None: all up to it
    # (T, T): row i is query i over the keys; each sums to 1, hidden keys are 0.
    weights: Matrix = field(metadata={"causal": True})
    measure: Literal["attention", "value"]  # "value": each key's contribution, as a share of 1
    selection: str = ""  # why tgen selected this head; "": the user did


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """Metrics of one head: means over all queries but the first (which sees only itself)."""

    layer: int
    head: int
    kv_head: int
    window: int | None  # as in AttentionReport
    role: str  # the metric furthest above its baseline, e.g. "previous"; "": none is clear
    entropy: float  # nats
    effective_keys: float  # mean of exp(entropy)
    normalized_entropy: float  # entropy / ln(visible keys); 1 for uniform attention
    confidence: float  # the largest weight
    distance: float  # tokens from the query back to the key
    self: float  # weight on the query's own position
    previous: float  # weight on the preceding token
    first: float  # weight on the first token, over all queries: the attention-sink score
    text_induction: float | None  # on what followed the same token, if any; None: no repetition
    duplicate: float | None  # weight on the token's copy in repeated random text; None: no room
    duplicate_control: float | None  # the same positions in text without repetition
    induction: float | None  # weight on the token after that copy
    induction_control: float | None
    induction_std: float | None  # standard deviation over the random texts
    distance_histogram: list[float]  # weight 0, 1, 2-3, 4-7, ... tokens back; sums to 1
    ablation_cost: float | None  # loss increase without the head, nats per token; None: not run


@dataclass(frozen=True, kw_only=True)
class HeadsReport:
    """Metrics of all heads, and those of uniform attention."""

    heads: list[HeadReport]
    baseline: dict[str, float]  # uniform attention's metrics, by field name of HeadReport
    window_baseline: dict[str, float] | None  # in a sliding window; None: it hides no key
    n_queries: int  # queries averaged
    block_length: int  # tokens per block of repeated random text; 0: no room
    n_seeds: int  # random texts
    sampled_from: str  # the tokens that random text is sampled from
    same_tokens: bool  # whether the control reorders the first block's tokens
    repeat_gain: float | None  # loss of the control minus that of the copy, nats per token
    loss: float | None  # nats per token of the text; None: heads were not ablated

    def baseline_of(self, head: HeadReport) -> dict[str, float]:
        """Return the metrics of uniform attention over the keys that a head can see."""
        return self.baseline if head.window is None else self.window_baseline or self.baseline


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A candidate for the next token."""

    id: int
    text: bytes
    probability: float
    logit: float


@dataclass(frozen=True, kw_only=True)
class TokenReport:
    """A token of the text, and how well the model predicted it."""

    index: int
    id: int
    text: bytes
    byte_offset: int  # offset of its first byte in the text
    surprisal: float | None  # bits; None: the first token is not predicted
    rank: int | None  # 0: the most likely token
    top_id: int | None  # the most likely token at this position
    top_text: bytes | None
    top_probability: float | None


@dataclass(frozen=True, kw_only=True)
class TextReport:
    """All tokens of a text, and its loss."""

    tokens: list[TokenReport]
    n_bytes: int
    nats_per_token: float | None  # None: a single token
    perplexity: float | None
    bits_per_byte: float | None  # over the bytes of the predicted tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class LensReport:
    """Next-token predictions after each layer (the logit lens)."""

    layers: list[str]  # "embedding", then one name per layer
    first: int  # the first position
    top_ids: list[list[int]]  # the most likely token by layer and position
    top_texts: list[list[bytes]]
    top_probabilities: Matrix  # (layers, positions)
    query: int
    candidates: list[list[Prediction]]  # by layer, at `query`
    answer: int  # the last layer's most likely token at `query`
    answer_text: bytes
    answer_ranks: list[int]  # by layer
    answer_probabilities: list[float]  # by layer


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The contribution of one model component to a logit."""

    component: str
    layer: int | None
    head: int | None
    logit: float


@dataclass(frozen=True, kw_only=True)
class TokenContribution:
    """The contribution of one earlier token to a logit, and the logit without the token."""

    position: int
    id: int
    text: bytes
    logit: float | None  # through attention, of all heads; None: post-norm model
    logit_without: float | None  # of the model run on the text without the token; None: not run
    log_probability_without: float | None  # nats


@dataclass(frozen=True, kw_only=True)
class AttributionReport:
    """A logit as the sum of its contributions (direct logit attribution), in two ways.

    `contributions` sum to the logit; so do `embedding`, `feed_forward`, `biases` and the logits of
    `tokens`. A target of several tokens has sums over them. None: post-norm model.
    """

    query: int
    targets: list[int]  # ids
    target_text: bytes
    log_probability: float  # nats
    logit: float
    contributions: list[Contribution]  # of components, largest magnitude first
    tokens: list[TokenContribution]  # up to the last token before the end of the target
    embedding: float | None  # of the predicting position itself
    feed_forward: float | None  # of all layers
    biases: float | None  # of values and outputs of attention, the final norm and the output
    difference: float | None  # the larger one between these sums and the logit
    normalizes_outputs: bool  # whether norms of sublayers' outputs are held constant too


@dataclass(frozen=True, kw_only=True)
class GroupAblation:
    """A text without a group of heads and layers."""

    group: str
    loss: float  # nats per token
    cost: float  # loss increase
    divergence: float  # nats: KL(complete || ablated) of the next token
    predictions: list[Prediction]  # of the next token


@dataclass(frozen=True, kw_only=True)
class AblationReport:
    """A text with the complete model and without groups of its heads and layers."""

    kind: Literal["zero", "mean"]  # what replaces the outputs
    loss: float  # nats per token
    predictions: list[Prediction]
    groups: list[GroupAblation]


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchReport:
    """The share of a logit difference that each activation of the prompt restores after another
    prompt."""

    part: str  # "residual", "attention", "feed_forward" or "heads"
    scores: Matrix  # (layers, positions), or (layers, heads) of the part "heads"
    target: int  # id of the token whose logit minus that of `contrast` is compared
    target_text: bytes
    contrast: int
    contrast_text: bytes
    difference: float  # after the prompt: a score of 1
    other_difference: float  # after the other prompt: a score of 0
    other_ids: list[int]
    other_tokens: list[bytes]


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutReport:
    """The share of each token in each position after a layer (attention rollout)."""

    layer: int
    weights: Matrix = field(metadata={"causal": True})  # (T, T), as in AttentionReport


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionsReport:
    """The model's position encoding as a matrix."""

    kind: Literal["sinusoidal", "learned", "similarity", "rotary", "rotary_local"]
    title: str
    values: Matrix  # (rows, columns), from -1 to 1 except for "learned"
    row_name: str
    column_name: str
    rows: list[str]
    columns: list[str]


@dataclass(frozen=True, kw_only=True)
class SourcePlace:
    """A place of the training text that has a passage."""

    file: str  # relative
    line: int  # from 1, in the text that was read from the file; of rows, the row's
    before: bytes  # text around the passage, in the same document
    after: bytes


@dataclass(frozen=True, kw_only=True)
class SourcePassage:
    """A passage of a text that also occurs in the training text."""

    start: int  # byte offsets in the text
    end: int
    text: bytes
    occurrences: int
    places: list[SourcePlace]  # the first ones


@dataclass(frozen=True, kw_only=True)
class SourcesReport:
    """The longest passages of a text that occur in the training text."""

    passages: list[SourcePassage]  # longest first; none is part of another
    n_passages: int  # with those that are not listed
    n_bytes: int  # of the text
    n_covered: int  # bytes in the passages listed
    corpus_bytes: int  # of the training text


@dataclass(frozen=True)
class Check:
    """A self-check that the output equals the model's computation, within a limit."""

    name: str
    value: float  # the error
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """A model's configuration, tensors and sizes."""

    path: str
    family: str
    config: dict[str, Any]
    parameters: list[tuple[str, list[int], int, str]]  # name, shape, count, dtype
    n_parameters: int
    n_embedding_parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    attention_bytes: int  # one layer's attention weights over a full context, float32
    found_by: str = ""  # how the model's name was resolved to the path; "": unknown
