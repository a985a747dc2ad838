"""Every record that the core hands out: frozen, plain numbers, units in the names.

The terminal is one reader of these, `--json` another, tests a third.
"""

import base64
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple


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


@dataclass(frozen=True)
class Choice:
    """A decision of the plan."""

    name: str
    value: str
    why: str


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
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step; on a GPU the means of ten, which are fetched together."""

    step: int
    loss: float | None  # nats a token, on the batch before the step; None: skipped, not finite
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
    standard_error: float | None  # of the bits per byte; None: too little text to say
    best: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """A text that the model writes at this point."""

    step: int
    prompt: bytes
    text: bytes


@dataclass(frozen=True, kw_only=True)
class BackReport:
    """The run goes on from an earlier state of its own."""

    step: int  # of that state
    left_step: int
    reason: str
    rate_scale: float  # of the planned learning rates, from here on


@dataclass(frozen=True, kw_only=True)
class MemorisationReport:
    """Whether a model writes or recites."""

    longest_run_bytes: int  # that its samples share with the training text
    natural_run_bytes: int  # that other text of the same length, unseen if held out, shares with it
    train_bits_per_byte: float
    held_out_bits_per_byte: float | None  # None: nothing was held out
    verdict: str  # begins with "memorises", "begins to memorise" or "does not memorise"


@dataclass(frozen=True, kw_only=True)
class DoneReport:
    """The end of a run, or of this sitting of it."""

    step: int
    finished: bool  # False: stopped before its end
    stopped_early: bool = False  # the held-out text was no longer predicted better
    best_step: int
    best_bits_per_byte: float | None  # None: nothing was held out or it was not yet evaluated
    seconds: float
    tokens: int
    out: str = ""
    baselines: dict[str, float] = field(default_factory=dict)  # bits per byte, by name


RunReport = (
    PlanReport
    | StepReport
    | EvalReport
    | SampleReport
    | BackReport
    | MemorisationReport
    | DoneReport
)


def json_record(report: RunReport) -> dict[str, Any]:
    """A report for JSON: {"kind": its name, **its fields}."""
    record = {"kind": type(report).__name__} | asdict(report)
    for name, value in list(record.items()):
        if isinstance(value, bytes):
            record |= json_text(value, name)
    return record


def json_text(data: bytes, name: str = "text") -> dict[str, str]:
    """Text for JSON: under `name`, and in base64 beside it where it is not valid UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        coded = base64.b64encode(data).decode()
        beside = "bytes" if name == "text" else f"{name}_bytes"
        return {name: data.decode(errors="replace"), beside: coded}


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
class TrainingCurves:
    """A run as series: a value a step, and a value an evaluation."""

    steps: list[int]
    seconds: list[float]  # of training, by step
    losses: list[float]  # nats a token, smoothed
    smoothed_over: int  # steps
    learning_rates: list[float]
    evaluation_steps: list[int]
    evaluation_losses: list[float]  # nats a token of the held-out text
    bits_per_nat: float | None  # bits a byte for each nat a token; None: it cannot be told
    best_step: int | None  # None: nothing was held out or it was not yet evaluated
    best_bits_per_byte: float | None
    tokens: int | None  # trained on; None: the log is of a version that does not tell
    median_tokens_per_second: float
    sittings: int


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
class PrecisionReport:
    """What weights in fewer bits cost: the same texts scored with both."""

    stored: str
    exact: str  # how the others are held
    tokens: int
    bits_per_byte: float
    exact_bits_per_byte: float
    max_logit_difference: float
