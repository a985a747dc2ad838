"""What a run hands out as it goes, and its curves."""

from dataclasses import dataclass, field

from tgen.config import Parallel


@dataclass(frozen=True)
class Choice:
    """A decision of the plan."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class PreparingReport:
    """A long text is being tokenised; nothing is planned yet, and there is nothing to save."""

    fraction_done: float
    seconds_left: float


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one of the ranks of a run holds at its peak, in bytes."""

    parallel: str  # ddp or fsdp
    weights: int
    gradients: int
    optimizer: int  # moments
    activations: int  # kept for the gradients
    copies: int  # of weights: blocks that are gathered, bfloat16 ones
    update: int  # in the making; not at the same time as activations and copies
    total: int


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """The same run on many ranks, by arithmetic."""

    n_ranks: int
    device_memory: int | None  # bytes that each of them has; None: not told
    on_gpu: bool
    parallel: str  # what would be chosen
    ranks: list[RankMemory]  # by DDP, by FSDP
    sent_bytes: dict[str, int]  # that a rank sends for one step, by the same names
    batch_size: int  # windows of a step, all ranks together
    step_tokens: int
    steps: int
    tokens: int  # of the run
    tokens_per_parameter: float
    epochs: float  # of the text to train on
    tokens_per_second: float  # all ranks together, each as fast as this machine
    efficiency: float  # that is counted with
    seconds: float  # of the run
    optimal_tokens_per_parameter: int  # by Hoffmann et al. (2022)
    optimal_tokens: int
    optimal_steps: int
    optimal_epochs: float
    optimal_seconds: float
    flops_per_token: int
    gpu_share: float  # of a GPU's peak that is counted with; for each 100 TFLOP/s of that peak:
    gpu_tokens_per_second: float  # all ranks together
    gpu_seconds: float
    gpu_optimal_seconds: float


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
    threads: int  # of each rank
    ranks: int
    parallel: Parallel | None  # how they share the model; None: there is one
    seed: int
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scaling: ScalingReport | None = None  # where it was asked for


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
class RollbackReport:
    """The run goes on from an earlier state of its own."""

    step: int  # of that state
    left_step: int
    reason: str
    rate_scale: float  # of the planned learning rates, from here on


@dataclass(frozen=True, kw_only=True)
class SavingReport:
    """The disk refused what was to be saved, and training goes on; or took it after that."""

    step: int
    failed: str  # why; empty: it is saved now
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class EventsReport:
    """The disk refused TensorBoard's events: training goes on, and no more of them are written."""

    step: int
    failed: str  # why


@dataclass(frozen=True, kw_only=True)
class MemorizationReport:
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
    PreparingReport
    | PlanReport
    | StepReport
    | EvalReport
    | SampleReport
    | RollbackReport
    | SavingReport
    | EventsReport
    | MemorizationReport
    | DoneReport
)


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
