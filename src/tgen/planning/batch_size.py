"""The windows in a step: as many tokens as time and memory allow, and no more than help."""

from functools import partial

from tgen.config.training import ResolvedTrainConfig
from tgen.planning.costs import step_seconds
from tgen.planning.fine_tuning import WINDOW, rows_per_step
from tgen.planning.memory import USABLE, rank_memory
from tgen.planning.model_size import PlanInputs, PlannedRun

_MIN_STEP_TOKENS, MAX_STEP_TOKENS = 2048, 16384  # of a rank
_MAX_UPDATE_SHARE = 0.1  # of a step's time that Muon may take: more tokens then cost little
_MIN_STEPS_PER_TOKEN = 300 / 4096  # of a run per token of a step: fewer, larger steps learn less
_FROZEN_WORK = 4 / 6  # of products, without the gradients of the weights


def choose_batch_size(run: PlannedRun) -> int:
    """Return the windows in a step of a new model, a multiple of the ranks."""
    inputs = run.inputs
    wanted = _balanced_tokens(run) if inputs.on_cpu else MAX_STEP_TOKENS  # with fewer, a GPU idles
    while wanted > _MIN_STEP_TOKENS and not _fits(run, wanted):
        wanted //= 2
    limit = inputs.train_tokens // (8 * run.context)  # a step sees an eighth of the corpus at most
    if inputs.memorizes_rows:  # or all of it: answers that one step learns are forgotten in others
        limit = -(-inputs.train_tokens // run.context)
    return inputs.n_ranks * max(1, min(wanted // run.context, limit // inputs.n_ranks))


def _balanced_tokens(run: PlannedRun) -> int:
    """Return a rank's tokens per step of which Muon takes a small share, if time allows."""
    wanted, train = _MIN_STEP_TOKENS, run.train
    if train.steps is not None or train.optimizer != "muon":
        return wanted
    seconds = partial(seconds_of_step, run, n_ranks=run.inputs.n_ranks)
    while wanted < MAX_STEP_TOKENS:
        step, without = seconds(wanted), seconds(wanted, without_muon=True)
        is_cheap = step - without <= _MAX_UPDATE_SHARE * step
        min_steps = _MIN_STEPS_PER_TOKEN * 2 * wanted
        if is_cheap or min_steps * seconds(2 * wanted) > 60 * train.minutes:
            break
        wanted *= 2
    return wanted


def fine_tuning_windows(run: PlannedRun) -> int:
    """Return the windows with about as many rows as `rows_per_step`; a multiple of the ranks."""
    inputs = run.inputs
    row = row_tokens(inputs)
    n_rows = round(inputs.train_tokens / row)
    windows = round(rows_per_step(n_rows) * row / run.context)
    limit = inputs.train_tokens // run.context  # a step sees the corpus once at most
    return inputs.n_ranks * max(1, min(windows, limit) // inputs.n_ranks)


def seconds_of_step(
    run: PlannedRun, n_tokens: int, *, n_ranks: int = 1, without_muon: bool = False
) -> float:
    """Return the measured or estimated seconds of a step of `n_tokens` on one of `n_ranks`."""
    train, inputs = run.train, run.inputs
    if inputs.measured_step is not None:
        return inputs.measured_step.seconds_of(n_tokens, muon=not without_muon)
    return step_seconds(
        run.model,
        n_tokens,
        inputs.flops_per_second / n_ranks,
        precision=run.precision,
        context=run.context,
        muon=train.optimizer == "muon" and train.lora is None and not without_muon,
        work=_FROZEN_WORK if train.lora is not None else 1.0,
    )


def _fits(run: PlannedRun, step_tokens: int) -> bool:
    train, inputs = run.train, run.inputs
    if inputs.rank_memory is None:
        return True
    batch_size = max(train.accumulation, step_tokens // run.context)
    chosen = {"batch_size": batch_size, "precision": run.precision}
    config = ResolvedTrainConfig(**train.explicit | chosen)
    needed = rank_memory(
        run.model, config, context=run.context, n_ranks=1, parallel="ddp", on_gpu=not inputs.on_cpu
    )
    return needed.total <= USABLE * inputs.rank_memory


def row_tokens(inputs: PlanInputs) -> float:
    """Return the mean tokens of a row; plain text counts as rows of `WINDOW` tokens."""
    return inputs.train_tokens / inputs.train_rows if inputs.train_rows else WINDOW
