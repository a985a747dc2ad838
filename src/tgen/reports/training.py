"""Reports of a training run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A choice of the plan and its reason."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """A phase other than training begins or goes on; the log of a run does not contain it."""

    phase: str  # for example "tokenizing"
    fraction_done: float | None = None  # None: unknown
    seconds_left: float | None = None  # None: unknown
    saved: bool = False  # the run is on disk: it can be resumed


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Estimated peak memory of one rank, in bytes."""

    parallel: str  # ddp or fsdp
    weights: int
    gradients: int
    optimizer: int  # moments
    activations: int  # stored for the gradients
    copies: int  # copies of weights: gathered blocks, bfloat16 copies
    update: int  # optimizer update; not at the same time as activations and copies
    saving: int  # rank 0's copies at a save, in RAM: the weights for the model, or its state
    total: int


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """Estimate of the same run on many ranks."""

    n_ranks: int
    device_memory: int | None  # bytes per rank; None: unknown
    on_gpu: bool
    parallel: str  # ddp or fsdp, as a run would choose
    ranks: list[RankMemory]  # with DDP, with FSDP
    sent_bytes: dict[str, int]  # per rank and step, by ddp and fsdp
    batch_size: int  # windows per step, over all ranks
    step_tokens: int
    steps: int
    tokens: int  # tokens in the run
    tokens_per_parameter: float
    epochs: float  # epochs over the training text
    tokens_per_second: float  # over all ranks, each as fast as this machine
    efficiency: float  # assumed for several ranks
    seconds: float  # duration of the run
    optimal_tokens_per_parameter: int  # Hoffmann et al. (2022)
    optimal_tokens: int
    optimal_steps: int
    optimal_epochs: float
    optimal_seconds: float
    flops_per_token: int
    gpu_share: float  # assumed share of a GPU's peak; the rest is per 100 TFLOP/s of that peak
    gpu_tokens_per_second: float  # over all ranks
    gpu_seconds: float
    gpu_optimal_seconds: float


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Adjacent tokens of an example that are all in the loss, or all not."""

    text: str  # control tokens are written by their names
    in_loss: bool


@dataclass(frozen=True, kw_only=True)
class RowsReport:
    """The conversations that a run trains on."""

    rows: int
    held_out_rows: int
    examples: int  # more than rows if the template rewrites earlier turns
    target_tokens: int  # per epoch
    end_token: str  # ends an answer
    first_row: list[RowPart]  # the first example as it will be learned


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The validation loss that the run is expected to reach if it gets more steps."""

    steps: int  # in total
    minutes: float | None  # in total; None: the run has a number of steps
    bits_per_byte: float
    error: float  # bits per byte: 90% of the measured runs were that close


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plan of a run."""

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
    minutes: float | None  # None: `steps` is set
    steps: int | None
    device: str
    threads: int  # per rank
    ranks: int
    parallel: str | None  # None: a single rank
    seed: int
    corpus_sha256: str = ""
    tokens_per_second: float = 0.0  # expected; 0: unknown
    flops_per_token: int = 0  # of training
    settings: dict[str, Any] = field(default_factory=dict)  # all of the run, see `TrainConfig`
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scaling: ScalingReport | None = None  # with --ranks or --device-memory
    rows: RowsReport | None = None  # of a corpus of conversations
    forecast: Forecast | None = None  # of a finished run that gets more steps or minutes


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step; on a GPU means over up to ten, which are fetched together."""

    step: int
    loss: float | None  # nats per token of the batch before the step; None: skipped, not finite
    learning_rate: float
    tokens_per_second: float
    seconds: float  # training time so far
    fraction_done: float
    seconds_left: float
    other_cpus: float | None = None  # CPUs used by other processes, if they slow the training


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """An evaluation on the held-out text, every target token predicted once."""

    step: int
    loss: float  # nats per token
    bits_per_byte: float
    standard_error: float | None  # bits per byte; None: too little text
    best: bool
    logit_scale: float  # factor of the logits, see `temperature_scaling`
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AnswersReport:
    """A check of the answers to learn, in a run that ends once greedy decoding reproduces them."""

    step: int
    n_exact: int  # reproduced to the last token
    n_checked: int  # fewer than all if many are wrong
    n_answers: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """A text generated by the model at this step."""

    step: int
    prompt: bytes
    text: bytes


@dataclass(frozen=True, kw_only=True)
class RollbackReport:
    """The run continues from an earlier checkpoint."""

    step: int  # step of that checkpoint
    from_step: int  # where the run was
    reason: str
    learning_rate_scale: float  # factor of the planned learning rates, from here on


@dataclass(frozen=True, kw_only=True)
class DivergedReport:
    """The run has ended: it diverged again after several rollbacks. It is in the log alone."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SavingReport:
    """A checkpoint could not be saved and training continues; or a retry succeeded."""

    step: int
    failed: str  # the reason; empty: the retry succeeded
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class EventsReport:
    """Numbers could not be written to the log of another program; training continues without."""

    step: int
    failed: str  # the reason
    name: str = "TensorBoard's log"  # of the log


@dataclass(frozen=True, kw_only=True)
class MemorizationReport:
    """Whether the model memorizes its training text."""

    longest_run_bytes: int  # longest run that samples share with the training text
    # The same for held-out text or, if none, the end of the training text; None: these are rows
    natural_run_bytes: int | None
    train_bits_per_byte: float
    held_out_bits_per_byte: float | None  # None: nothing was held out
    verdict: str  # begins with "memorizes", "begins to memorize" or "does not memorize"


@dataclass(frozen=True, kw_only=True)
class DoneReport:
    """The end of a run or of this session."""

    step: int
    finished: bool  # False: interrupted
    stopped_early: bool = False  # validation loss stopped improving
    learned: bool = False  # every answer was reproduced in two evaluations in a row
    best_step: int
    best_bits_per_byte: float | None  # None: no evaluation so far
    seconds: float
    tokens: int
    out: str = ""
    sample_prompt: bytes = b""  # as of the samples
    baselines: dict[str, float] = field(default_factory=dict)  # bits per byte, by name
    general_before: float | None = None  # bits per byte of the general text; None: not fine-tuned
    general_after: float | None = None
    general_tokens: int = 0  # of the general text
    forecast: Forecast | None = None  # of twice the steps or minutes; None: the curve allows none


RunReport = (
    PhaseReport
    | PlanReport
    | StepReport
    | EvalReport
    | AnswersReport
    | SampleReport
    | RollbackReport
    | SavingReport
    | EventsReport
    | MemorizationReport
    | DoneReport
)
LoggedReport = RunReport | DivergedReport
