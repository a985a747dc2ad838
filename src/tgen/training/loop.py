"""The training loop: yields steps and evaluations as they happen; never prints or saves."""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tgen import distributed
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import PackedRows
from tgen.errors import DivergedError
from tgen.machine.memory import retain_freed_memory
from tgen.machine.openmp_wait import other_cpus
from tgen.model.precision import product_precision
from tgen.model.transformer import Transformer
from tgen.reports.training import AnswersReport, DoneReport, EvalReport, StepReport
from tgen.training.early_stopping import has_learned, record_answers, record_evaluation
from tgen.training.evaluation import Batches, evaluate
from tgen.training.exact_answers import count_exact
from tgen.training.loss import count_targets, split, to_device
from tgen.training.schedule import (
    end_in_time,
    in_decay,
    lr_factor,
    seconds_per_step,
    update_schedule,
)
from tgen.training.state import Progress, TrainState, full_tensor

_MAX_SKIPS = 3  # consecutive steps that are not finite: divergence
_MIN_RESCALING = 0.02  # of the logits, at the end: less changes the loss by about 0.0003 bits
# Losses are fetched from a GPU together, so that it never waits; no look at the clock and at
# signals is much later than a second after the one before.
_MAX_SYNC_STEPS, _SYNC_SECONDS = 10, 1.0


def train(
    model: Transformer,
    batches: Batches,
    config: ResolvedTrainConfig,
    state: TrainState,
    *,
    answers: PackedRows | None = None,
    clock: Callable[[], float] = distributed.clock,
) -> Iterator[StepReport | EvalReport | AnswersReport | DoneReport]:
    """Train from `state` to the end of the schedule; the caller may stop at any yield.

    With `config.minutes` the clock decides the step at which the learning rate starts to decay;
    the state stores it, so that a resumed run repeats it. A step whose gradient is not finite
    changes nothing. Raises DivergedError after three such steps in a row, or for a validation loss
    that is not finite. Ends without a DoneReport where early stopping requires the best checkpoint
    (`progress.restore_best`), and early with one once all `answers` are learned. All ranks report
    and decide the same.
    """
    if _device(model).type == "cpu":
        retain_freed_memory()
    progress = state.progress
    started = clock() - progress.seconds  # time between steps counts too
    sync_every = 1  # steps
    pending: list[Tensor] = []  # losses on the device
    synced_at = clock()
    while not progress.restore_best and progress.step != progress.total_steps:
        if not pending or config.max_steps is not None or progress.ends_to_repeat:
            progress.seconds = clock() - started
            update_schedule(progress, config)
        with product_precision(config.precision), distributed.short_timeout():
            pending.append(_step(model, batches, config, state))
        progress.step += 1
        progress.windows += config.batch_size
        progress.steps_taken += 1
        if len(pending) < sync_every and not evaluation_is_due(progress, config):
            continue
        losses = torch.stack(pending).tolist()
        now = clock()
        progress.seconds = now - started
        end_in_time(progress, config)
        due = evaluation_is_due(progress, config)
        _count_skipped(progress, losses)
        finite = [loss for loss in losses if math.isfinite(loss)]
        n_tokens = len(pending) * config.batch_size * batches.context_length
        yield StepReport(
            step=progress.step,
            loss=statistics.fmean(finite) if finite else None,
            learning_rate=config.learning_rate * lr_factor(progress, config, progress.step - 1),
            tokens_per_second=n_tokens / (now - synced_at),
            seconds=progress.seconds,
            other_cpus=other_cpus() if _device(model).type == "cpu" else None,
            **_remaining(progress, config),
        )
        if _device(model).type != "cpu":  # by the clock of rank 0, so that all ranks agree
            sync_every = _steps_until_sync((now - synced_at) / len(pending))
        pending = []
        if due and batches.val_bytes > 0:
            yield _evaluation(batches, config, state)
            progress.evaluation_seconds = clock() - started - progress.seconds
        elif due and answers is not None:
            yield _check_answers(answers, config, state)
            progress.evaluation_seconds = clock() - started - progress.seconds
        synced_at = clock()
    if progress.restore_best:
        progress.seconds = clock() - started
        return
    yield done_report(progress, batches, finished=True)


def _steps_until_sync(step_seconds: float) -> int:
    return max(1, min(_MAX_SYNC_STEPS, int(_SYNC_SECONDS / max(step_seconds, 1e-6))))


def done_report(progress: Progress, batches: Batches, *, finished: bool) -> DoneReport:
    """Return the report of the end of a run or of a session."""
    return DoneReport(
        step=progress.step,
        finished=finished,
        stopped_early=finished and progress.stopped_early,
        learned=finished and has_learned(progress),
        best_step=progress.best_step,
        best_bits_per_byte=progress.best_bits_per_byte,
        seconds=progress.seconds,
        tokens=progress.windows * batches.context_length,
    )


def evaluation_is_due(progress: Progress, config: ResolvedTrainConfig) -> bool:
    """Whether an evaluation (or a save, if nothing is held out) follows the last step."""
    return progress.step % config.eval_every == 0 or progress.step == progress.total_steps


def _step(
    model: Transformer, batches: Batches, config: ResolvedTrainConfig, state: TrainState
) -> Tensor:
    """Update once; return the loss () on the device, nats per token, NaN for a skipped step."""
    progress = state.progress
    n_ranks = distributed.ranks().world_size
    factor = lr_factor(progress, config, progress.step)
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    if not model.training:  # after an evaluation or a sample
        state.loss_module.train()
    rows = distributed.share(config.batch_size)
    windows = batches.batch(
        progress.step,
        first=progress.windows,
        bpe_dropout=_bpe_dropout(progress, config, factor),
        rows=rows,
    )
    n_parts = min(config.accumulation, config.batch_size // n_ranks)  # each with a window
    parts = split(to_device(windows, _device(model)), n_parts)
    losses = []
    n_targets = max(1, distributed.total(count_targets(windows)))
    for i, part in enumerate(parts, 1):
        if config.dropout > 0:
            _seed_dropout(model, config, progress.step, rows[: len(part.tokens)])
            rows = rows[len(part.tokens) :]
        with state.gradient_sync(enabled=i == len(parts)):
            loss = state.step_loss(part) / n_targets
            (loss * n_ranks).backward()  # torch averages over the ranks
        losses.append(loss.detach())
    total = distributed.all_reduce_sum(torch.stack(losses).sum())
    trainable = [p for group in groups for p in group["params"] if p.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in trainable]))
    skip = ~(norm.isfinite() & total.isfinite())
    torch.nn.utils.clip_grads_with_norm_(trainable, config.grad_clip, norm)
    for optimizer in state.optimizers:
        optimizer.step(found_inf=skip.float())
    for parameter in trainable:
        parameter.grad = None
    return torch.where(skip, torch.nan, total)


def _bpe_dropout(progress: Progress, config: ResolvedTrainConfig, factor: float) -> float:
    if not in_decay(progress):
        return config.bpe_dropout
    if not config.bpe_dropout_in_decay:
        return 0.0
    return config.bpe_dropout * factor / progress.learning_rate_scale


def _count_skipped(progress: Progress, losses: list[float]) -> None:
    for loss in losses:
        progress.consecutive_skips = 0 if math.isfinite(loss) else progress.consecutive_skips + 1
        progress.skipped_steps += not math.isfinite(loss)
        if progress.consecutive_skips == _MAX_SKIPS:
            raise DivergedError(f"the loss or its gradient was not finite at step {progress.step}")


def _seed_dropout(model: Transformer, config: ResolvedTrainConfig, step: int, rows: range) -> None:
    """Make dropout a function of seed, step and row, also of a row that is computed twice; on a GPU
    or compiled, of the first row."""
    keys = [np.random.SeedSequence([config.seed, step, row]) for row in rows]
    if config.passes > 1:
        keys += [np.random.SeedSequence([config.seed, step, row, 1]) for row in rows]
    seeds = [int(key.generate_state(1, np.uint64)[0] >> 1) for key in keys]
    torch.manual_seed(seeds[0])
    if _device(model).type == "cpu" and not config.compile:
        model.dropout.generators = [torch.Generator().manual_seed(seed) for seed in seeds]


def _evaluation(batches: Batches, config: ResolvedTrainConfig, state: TrainState) -> EvalReport:
    progress = state.progress
    progress.logit_scale = progress.next_logit_scale
    scaled = partial(evaluate, state.loss_module, batches, max_tokens=config.eval_tokens)
    evaluation = scaled(logit_scale=progress.logit_scale)
    if config.temperature_scaling:
        progress.next_logit_scale = evaluation.best_logit_scale
        change = abs(progress.next_logit_scale / progress.logit_scale - 1)
        if progress.step == progress.total_steps and change > _MIN_RESCALING:
            rescaled = scaled(logit_scale=progress.next_logit_scale)
            if rescaled.loss < evaluation.loss:
                evaluation, progress.logit_scale = rescaled, progress.next_logit_scale
    if not math.isfinite(evaluation.bits_per_byte):
        raise DivergedError(f"the validation loss was {evaluation.loss} at step {progress.step}")
    return EvalReport(
        step=progress.step,
        loss=evaluation.loss,
        bits_per_byte=evaluation.bits_per_byte,
        standard_error=evaluation.standard_error,
        best=record_evaluation(progress, config, evaluation),
        logit_scale=progress.logit_scale,
        seconds=progress.seconds,
    )


def _check_answers(
    answers: PackedRows, config: ResolvedTrainConfig, state: TrainState
) -> AnswersReport:
    progress, n_answers = state.progress, answers.n_rows
    n_exact, n_checked = count_exact(state.loss_module, answers, max_tokens=config.eval_tokens)
    record_answers(progress, n_exact, n_answers)
    return AnswersReport(
        step=progress.step,
        n_exact=n_exact,
        n_checked=n_checked,
        n_answers=n_answers,
        seconds=progress.seconds,
    )


def _remaining(progress: Progress, config: ResolvedTrainConfig) -> dict[str, float]:
    total_steps = progress.total_steps or config.steps
    if total_steps is not None:
        left = (total_steps - progress.step) * seconds_per_step(progress)
        done = progress.step / total_steps
    else:
        left = max(0.0, config.minutes * 60 - progress.seconds)
        done = progress.seconds / (config.minutes * 60)
    return {"fraction_done": min(1.0, done), "seconds_left": left}


def _device(model: Transformer) -> torch.device:
    return model.token_embedding.weight.device
