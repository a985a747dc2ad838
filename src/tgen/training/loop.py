"""The training loop: steps and evaluations, yielded as they happen. It never prints or saves."""

import math
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tgen import distributed
from tgen.config import TrainConfig
from tgen.errors import DivergedError
from tgen.model.transformer import Transformer
from tgen.reports import DoneReport, EvalReport, StepReport
from tgen.training.early_stopping import (
    begin_decay_if_due,
    decays,
    evaluation_is_due,
    note_evaluation,
    seconds_per_step,
)
from tgen.training.evaluation import Batches, count_scored, evaluate, split, to_device
from tgen.training.optimizers import rate_factor
from tgen.training.state import Progress, TrainState, full_tensor

_SKIPS = 3  # unsound steps in a row that end a run
_READ_EVERY = 10  # steps whose losses are fetched from a GPU together: it never waits for us


def train(
    model: Transformer,
    batches: Batches,
    config: TrainConfig,
    state: TrainState,
    *,
    clock: Callable[[], float] = distributed.clock,
) -> Iterator[StepReport | EvalReport | DoneReport]:
    """Trains from where `state` stands to the end of the schedule; any yield is a place to stop.

    With `config.minutes` the clock decides the step at which the learning rate begins to fall. It
    is kept in the state, so a resumed run repeats it. A step with a gradient that is not finite
    changes nothing; three in a row, or a validation loss that is not finite: DivergedError. Without
    a DoneReport it ends where `progress.go_back` asks for the best state (`begin_early_decay`).
    Ranks that share the work go in step: what they report and decide is the same.
    """
    progress = state.progress
    began = clock() - progress.seconds  # what happens between the steps counts too
    read_every = 1 if _device(model).type == "cpu" else _READ_EVERY
    unread: list[Tensor] = []
    read_at = clock()
    while not progress.go_back and progress.step != progress.total_steps:
        if not unread:
            progress.seconds = clock() - began
            begin_decay_if_due(progress, config)
        unread.append(_step(model, batches, config, state))
        progress.step += 1
        progress.steps_taken += 1
        due = evaluation_is_due(progress, config)
        if len(unread) < read_every and not due:
            continue
        losses = torch.stack(unread).tolist()
        now = clock()
        progress.seconds = now - began
        _count_skipped(progress, losses)
        finite = [loss for loss in losses if math.isfinite(loss)]
        n_tokens = len(unread) * config.batch_size * batches.context_length
        yield StepReport(
            step=progress.step,
            loss=statistics.fmean(finite) if finite else None,
            learning_rate=config.learning_rate * _rate(progress, config, progress.step - 1),
            tokens_per_second=n_tokens / (now - read_at),
            seconds=progress.seconds,
            **_outlook(progress, config),
        )
        unread = []
        if due and batches.held_out_bytes > 0:
            yield _evaluation(batches, config, state)
            progress.evaluation_seconds = clock() - began - progress.seconds
        read_at = clock()
    if progress.go_back:
        progress.seconds = clock() - began
        return
    yield done_report(progress, config, batches, finished=True)


def done_report(
    progress: Progress, config: TrainConfig, batches: Batches, *, finished: bool
) -> DoneReport:
    """Where a run stands at its end, or at the end of a sitting."""
    return DoneReport(
        step=progress.step,
        finished=finished,
        stopped_early=finished and progress.stopped_early,
        best_step=progress.best_step,
        best_bits_per_byte=progress.best_bits_per_byte,
        seconds=progress.seconds,
        tokens=progress.step * config.batch_size * batches.context_length,
    )


def _step(model: Transformer, batches: Batches, config: TrainConfig, state: TrainState) -> Tensor:
    """One update; its loss, nats a token, () on the device: NaN where the step was skipped."""
    progress = state.progress
    n_ranks = distributed.ranks().world_size
    factor = _rate(progress, config, progress.step)
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    if not model.training:  # whoever wrote a sample with it has changed that
        state.learner.train()
    token_split = _token_split(progress, config, factor)
    rows = distributed.share(config.batch_size)
    windows = batches.batch(progress.step, token_split=token_split, rows=rows)
    n_parts = min(config.accumulation, config.batch_size // n_ranks)  # none without a row
    parts = split(to_device(windows, _device(model)), n_parts)
    losses = []
    n_scored = max(1, distributed.total(count_scored(windows)))
    for i, part in enumerate(parts, 1):
        if config.dropout > 0:
            _draw_masks(model, config, progress.step, rows[: len(part.tokens)])
            rows = rows[len(part.tokens) :]
        with state.exchange(now=i == len(parts)):
            loss = state.step_loss(part) / n_scored
            (loss * n_ranks).backward()  # of which the ranks' mean is taken
        losses.append(loss.detach())
    total = distributed.all_reduce_sum(torch.stack(losses).sum())
    learning = [p for group in groups for p in group["params"] if p.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in learning]))
    unsound = ~(norm.isfinite() & total.isfinite())
    torch.nn.utils.clip_grads_with_norm_(learning, config.grad_clip, norm)
    for optimizer in state.optimizers:
        optimizer.step(found_inf=unsound.float())
    for parameter in learning:
        parameter.grad = None
    return torch.where(unsound, torch.nan, total)


def _token_split(progress: Progress, config: TrainConfig, factor: float) -> float:
    if not decays(progress):
        return config.token_split
    return config.token_split * factor / progress.rate_scale if config.split_in_decay else 0.0


def _rate(progress: Progress, config: TrainConfig, step: int) -> float:
    return progress.rate_scale * rate_factor(
        step,
        warmup_steps=config.warmup_steps,
        decay_start=progress.decay_start,
        total_steps=progress.total_steps,
    )


def _count_skipped(progress: Progress, losses: list[float]) -> None:
    for loss in losses:
        progress.skipped_in_a_row = 0 if math.isfinite(loss) else progress.skipped_in_a_row + 1
        progress.skipped += not math.isfinite(loss)
        if progress.skipped_in_a_row == _SKIPS:
            raise DivergedError(f"the loss or its gradient was not finite at step {progress.step}")


def _draw_masks(model: Transformer, config: TrainConfig, step: int, rows: range) -> None:
    """Makes the dropout of a pass a function of seed, step and row; on a GPU, or compiled, of the
    first row."""
    keys = [np.random.SeedSequence([config.seed, step, row]) for row in rows]
    seeds = [int(key.generate_state(1, np.uint64)[0] >> 1) for key in keys]
    torch.manual_seed(seeds[0])
    drawn = None if config.compile else [torch.Generator().manual_seed(seed) for seed in seeds]
    model.dropout.generators = drawn


def _evaluation(batches: Batches, config: TrainConfig, state: TrainState) -> EvalReport:
    progress = state.progress
    loss, bits, error = evaluate(state.learner, batches, max_tokens=config.eval_tokens)
    if not math.isfinite(bits):
        raise DivergedError(f"the validation loss became {loss} at step {progress.step}")
    best = note_evaluation(progress, config, bits)
    return EvalReport(
        step=progress.step,
        loss=loss,
        bits_per_byte=bits,
        standard_error=error,
        best=best,
        seconds=progress.seconds,
    )


def _outlook(progress: Progress, config: TrainConfig) -> dict[str, float]:
    if progress.total_steps is not None:
        left = (progress.total_steps - progress.step) * seconds_per_step(progress)
        done = progress.step / progress.total_steps
    else:
        left = max(0.0, config.minutes * 60 - progress.seconds)
        done = progress.seconds / (config.minutes * 60)
    return {"fraction_done": min(1.0, done), "seconds_left": left}


def _device(model: Transformer) -> torch.device:
    return model.token_embedding.weight.device
