"""Every record that the core hands out: frozen, plain numbers, units in the names.

The terminal is one reader of these, `--json` another, tests a third.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Token:
    """One generated token."""

    row: int
    id: int
    logprob: float  # nats, under the model's own distribution
    rank: int  # 0: the most likely
    entropy: float  # nats, of that distribution
    last: bool  # the row ends here


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What a run is going to do, before it does it."""

    out: str
    resumed_at_step: int  # 0: a new run
    corpus_bytes: int
    train_tokens: int
    held_out_tokens: int
    tokenizer: str
    vocab_size: int
    family: str
    size: str
    n_parameters: int
    context_length: int
    shape: dict[str, int]
    batch_size: int
    learning_rate: float
    minutes: float | None  # None: `steps` rules
    steps: int | None
    device: str
    threads: int
    seed: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step."""

    step: int
    loss: float  # nats a token, on the batch before the step
    learning_rate: float
    tokens_per_second: float
    seconds: float  # of training so far
    fraction_done: float
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """The held-out text, every token predicted once."""

    step: int
    loss: float  # nats a token
    bits_per_byte: float
    best: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """A text that the model writes at this point."""

    step: int
    prompt: bytes
    text: bytes


@dataclass(frozen=True, kw_only=True)
class DoneReport:
    """The end of a run, or of this sitting of it."""

    step: int
    finished: bool  # False: stopped before its end
    best_step: int
    best_bits_per_byte: float | None  # None: nothing was held out or it was not yet evaluated
    seconds: float
    tokens: int
    out: str = ""


RunReport = PlanReport | StepReport | EvalReport | SampleReport | DoneReport


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """One head's attention over a text."""

    layer: int
    head: int
    weights: list[list[float]]  # row i: query i's weights over keys 0..i; each sums to 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A candidate for the next token."""

    id: int
    text: bytes
    probability: float
    logit: float


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What a model is made of."""

    path: str
    family: str
    fields: dict[str, object]  # the configuration
    parameters: list[tuple[str, list[int], int]]  # name, shape, count
    n_parameters: int
    n_embedding_parameters: int
    weight_bytes: int
    cache_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Several trials of one thing."""

    seconds: list[float]
    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One more round of trials is done; 0 was the warm-up."""

    trial: int
    trials: int


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """One text length of the cache benchmark."""

    length: int  # tokens before the one that is decoded
    prefill: Timing  # all of them in one pass, nothing cached before
    cached: Timing  # the next token with the cache
    uncached: Timing | None  # the next token from the whole text
    speedup: float | None  # uncached over cached, of the medians
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether text with and without the cache is the same."""

    tokens: int  # compared
    prompt_tokens: int
    identical: bool
    first_difference: int | None  # which generated token
    gap: float | None  # between the two best logits there
    max_logit_difference: float


@dataclass(frozen=True, kw_only=True)
class MemorisationReport:
    """Whether a model writes or recites."""

    longest_run_bytes: int  # that its samples share with the training text
    natural_run_bytes: int  # that unseen text of the same length shares with it
    train_bits_per_byte: float
    held_out_bits_per_byte: float | None  # None: nothing was held out
    verdict: str  # begins with "memorises", "begins to memorise" or "does not memorise"
