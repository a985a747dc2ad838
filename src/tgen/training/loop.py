"""The training loop: steps and evaluations, yielded as they happen. It never prints or saves."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tgen.config import TrainConfig
from tgen.errors import TrainingError
from tgen.model.transformer import Transformer
from tgen.reports import DoneReport, EvalReport, StepReport
from tgen.training.optim import rate_factor
from tgen.training.plan import MAX_EVAL_TOKENS
from tgen.training.state import Progress, TrainState

# Tokens (B, T + 1); which targets count (B, T), None: all; each input's document (B, T), None: one.
Windows = tuple[NDArray[np.int64], NDArray[np.bool_] | None, NDArray[np.int32] | None]
_NOT_SCORED = -100  # stands for the targets that do not count


class Batches(Protocol):
    """What the loop needs of a corpus: functions of the step, with no state of their own."""

    @property
    def held_out_tokens(self) -> int:
        """Tokens of the held-out text that are scored."""

    @property
    def held_out_bytes(self) -> int:
        """Bytes of the held-out text whose tokens are scored; 0: there is none."""

    def batch(self, step: int) -> Windows:
        """Windows of T + 1 tokens."""

    def held_out_windows(self, max_tokens: int) -> Iterator[Windows]:
        """Windows of up to T + 1 tokens each."""


def train(
    model: Transformer,
    batches: Batches,
    config: TrainConfig,
    state: TrainState,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[StepReport | EvalReport | DoneReport]:
    """Trains from where `state` stands to the end of the schedule; any yield is a place to stop.

    With `config.minutes` the clock decides one thing: the step at which the learning rate begins to
    fall. It is kept in the state, so a resumed run repeats it. Raises TrainingError if the loss is
    no longer finite.
    """
    progress = state.progress
    began = clock() - progress.seconds  # what happens between the steps counts too
    while progress.total_steps is None or progress.step < progress.total_steps:
        started = clock()
        _plan_end(progress, config)
        loss, rate = _step(model, batches, config, state)
        progress.step += 1
        n_tokens = config.batch_size * model.config.context_length
        took = clock() - started
        progress.seconds = clock() - began
        yield StepReport(
            step=progress.step,
            loss=loss,
            learning_rate=rate,
            tokens_per_second=n_tokens / took,
            seconds=progress.seconds,
            **_outlook(progress, config),
        )
        if batches.held_out_bytes > 0 and evaluation_is_due(progress, config):
            yield _evaluation(model, batches, progress)
    yield DoneReport(
        step=progress.step,
        finished=True,
        best_step=progress.best_step,
        best_bits_per_byte=progress.best_bits_per_byte,
        seconds=progress.seconds,
        tokens=progress.step * config.batch_size * model.config.context_length,
    )


def evaluation_is_due(progress: Progress, config: TrainConfig) -> bool:
    """Whether an evaluation (or, with nothing held out, a save) follows the step just taken."""
    assert config.eval_every is not None  # the plan has chosen
    return progress.step % config.eval_every == 0 or progress.step == progress.total_steps


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Batches, *, max_tokens: int = MAX_EVAL_TOKENS
) -> tuple[float, float]:
    """Nats per token and bits per byte of what is scored of the held-out text, each token once:
    nats of the scored tokens over the bytes they stand for, so of completions alone if only those
    are learnt.

    Of a text of more than `max_tokens` only windows spread evenly over it are predicted.
    """
    nats, n_tokens = 0.0, 0
    model.eval()
    for windows in batches.held_out_windows(max_tokens):
        total, n = _loss(model, windows)
        nats += float(total)
        n_tokens += n
    loss = nats / n_tokens
    return loss, loss * batches.held_out_tokens / math.log(2) / batches.held_out_bytes


def _step(
    model: Transformer, batches: Batches, config: TrainConfig, state: TrainState
) -> tuple[float, float]:
    """One update; its loss and its learning rate."""
    progress = state.progress
    factor = rate_factor(
        progress.step,
        warmup_steps=config.warmup_steps,
        decay_start=progress.decay_start,
        total_steps=progress.total_steps,
    )
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    model.train()
    if config.dropout > 0:  # the masks are a function of seed and step
        torch.manual_seed(_dropout_seed(config.seed, progress.step))
    total, n = _loss(model, batches.batch(progress.step))
    loss = total / max(1, n)  # a batch may hold nothing that is scored
    loss.backward()  # type: ignore[no-untyped-call]
    value = float(loss.detach())
    if not math.isfinite(value):
        raise _diverged("loss", value, progress.step)
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return value, config.learning_rate * factor


def _diverged(what: str, value: float, step: int) -> TrainingError:
    return TrainingError(
        f"the {what} became {value} at step {step}",
        "begin anew with --overwrite and lower rates: --set learning_rate=... "
        "--set matrix_learning_rate=...",
    )


def _dropout_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)


def _loss(model: Transformer, windows: Windows) -> tuple[Tensor, int]:
    """Cross-entropy, nats, summed over the scored targets given what comes before them in their
    document, and the number of these targets."""
    inputs, targets, documents = _tensors(windows, model.token_embedding.weight.device)
    logits = model(inputs, documents=documents)
    total = F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=_NOT_SCORED,
        reduction="sum",
    )
    return total, targets.numel() if windows[1] is None else int(windows[1].sum())


def _tensors(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets with those that do not count marked, and documents."""
    tokens, scored, documents = windows
    targets = tokens[:, 1:]
    if scored is not None:
        targets = np.where(scored, targets, _NOT_SCORED)
    return (
        torch.from_numpy(tokens[:, :-1]).to(device),
        torch.from_numpy(targets).to(device),
        None if documents is None else torch.from_numpy(documents).to(device),
    )


def _evaluation(model: Transformer, batches: Batches, progress: Progress) -> EvalReport:
    loss, bits = evaluate(model, batches)
    if not math.isfinite(bits):
        raise _diverged("validation loss", loss, progress.step)
    best = progress.best_bits_per_byte is None or bits < progress.best_bits_per_byte
    if best:
        progress.best_bits_per_byte, progress.best_step = bits, progress.step
    return EvalReport(
        step=progress.step, loss=loss, bits_per_byte=bits, best=best, seconds=progress.seconds
    )


def _plan_end(progress: Progress, config: TrainConfig) -> None:
    """Fixes the last step, and the one where the decay begins, as soon as both can be known."""
    if progress.total_steps is not None:
        return
    if config.steps is not None:
        progress.total_steps = config.steps
        progress.decay_start = round(config.steps * (1 - config.decay_fraction))
    elif (
        progress.seconds >= (1 - config.decay_fraction) * config.minutes * 60 and progress.step > 0
    ):
        left = max(0.0, config.minutes * 60 - progress.seconds)
        steps = max(1, int(left / _seconds_per_step(progress)))
        progress.decay_start, progress.total_steps = progress.step, progress.step + steps


def _seconds_per_step(progress: Progress) -> float:
    return (progress.seconds - progress.setup_seconds) / progress.step


def _outlook(progress: Progress, config: TrainConfig) -> dict[str, float]:
    per_step = _seconds_per_step(progress)
    if progress.total_steps is not None:
        left = (progress.total_steps - progress.step) * per_step
        done = progress.step / progress.total_steps
    else:
        left = max(0.0, config.minutes * 60 - progress.seconds)
        done = progress.seconds / (config.minutes * 60)
    return {"fraction_done": min(1.0, done), "seconds_left": left}
