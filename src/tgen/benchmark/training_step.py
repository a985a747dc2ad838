"""How fast a training step is, and how much of the machine it uses.

The steps are those of `tgen train`: its loop, loss and optimizers, advanced report by report, on
random tokens in which no document ends and none is taken apart; a step's time does not depend on
what the tokens are. Evaluations, samples and saving are no part of it. A block of steps warms up,
then blocks are timed; on a GPU each ends where its losses have arrived.

What a token needs of floating-point operations is counted as Kaplan et al. (2020, section 2.1) do:
6 for every weight that multiplies (2 forward, 4 backward; not the embedding, which is looked up),
and, as in PaLM (Chowdhery et al. 2022, appendix B), 12 for every layer, head, its width and key
that attention meets. That is half the context, since no token looks ahead: PaLM counts all of it.
What is done beside, or twice, does not count.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from tgen.benchmark.memory import peak_memory_bytes
from tgen.benchmark.statistics import timing
from tgen.config import ModelConfig, TrainConfig
from tgen.corpus import TokenDataset
from tgen.errors import UsageError
from tgen.model.device import choose_device, memory_bytes, set_threads
from tgen.reports import TrainingStepReport, TrialReport
from tgen.training.loop import train
from tgen.training.plan.memory_check import check_memory
from tgen.training.plan.model_size import flops_per_token
from tgen.training.state import new_state

_ENDLESS = 1 << 40  # steps
_TOKENS = 1 << 20


class Run:
    """A training run on random tokens, taken a few steps at a time; its seed says which."""

    def __init__(self, model: ModelConfig, config: TrainConfig, device: torch.device) -> None:
        self.state = new_state(model, config, device)
        endless = replace(config, steps=_ENDLESS, eval_every=_ENDLESS, token_split=0.0)
        store = random_text(model, config)
        self._reports = train(self.state.model, store, endless, self.state)

    def advance(self, n: int) -> int:
        """Takes at least `n` steps, to where their losses are known; how many there were."""
        before = self.state.progress.step
        while self.state.progress.step < before + n:
            next(self._reports)
        return self.state.progress.step - before


def random_text(model: ModelConfig, config: TrainConfig) -> TokenDataset:
    """Tokens drawn from the whole vocabulary, to be learnt in windows of the whole context."""
    kind = np.uint16 if model.vocab_size <= 1 << 16 else np.uint32
    n = max(_TOKENS, 2 * model.context_length)
    random = np.random.default_rng(config.seed)
    return TokenDataset(
        train=random.integers(model.vocab_size, size=n, dtype=kind),
        held_out=np.zeros(0, kind),
        held_out_bytes=0,
        context_length=model.context_length,
        batch_size=config.batch_size,
        seed=config.seed,
    )


def measure(
    model: ModelConfig,
    *,
    config: TrainConfig | None = None,
    steps: int = 10,
    trials: int = 5,
    device: str = "auto",
    threads: int | None = None,
    peak_flops: float | None = None,
) -> Iterator[TrialReport | TrainingStepReport]:
    """Times `trials` blocks of `steps` steps, on a GPU perhaps some more, after one to warm up.

    `config` says what a step is, by default the plan's 16 windows. `peak_flops` are the operations
    a second that the machine could do. Raises UsageError for a block of nothing, a device that is
    not there, or a step that needs more memory than there is.
    """
    config = config or TrainConfig()
    for name, value in (("steps", steps), ("trials", trials), ("peak_flops", peak_flops)):
        if value is not None and not value > 0:
            raise UsageError(f"{name} is {value}", "it must be above 0")
    chosen = choose_device(device)
    check_memory(model, config, model.context_length, memory_bytes(chosen))
    set_threads(threads)
    if chosen.type == "cuda":
        torch.cuda.reset_peak_memory_stats(chosen)
    run = Run(model, config, chosen)
    seconds, timed = [], 0
    for trial in range(trials + 1):
        began = time.perf_counter()
        taken = run.advance(steps)
        if trial > 0:
            seconds.append((time.perf_counter() - began) / taken)
            timed += taken
        yield TrialReport(trial=trial, trials=trials)
    yield _report(model, config, chosen, seconds, steps=timed, peak_flops=peak_flops)


def _report(
    model: ModelConfig,
    config: TrainConfig,
    device: torch.device,
    seconds: list[float],
    *,
    steps: int,
    peak_flops: float | None,
) -> TrainingStepReport:
    step = timing(seconds)
    tokens = config.batch_size * model.context_length
    speed = tokens / step.median
    achieved = speed * flops_per_token(model)
    on_gpu = device.type == "cuda"
    return TrainingStepReport(
        device=device.type,
        steps=steps,
        tokens_per_step=tokens,
        seconds=step,
        tokens_per_second=speed,
        flops_per_token=flops_per_token(model),
        flops_per_second=achieved,
        peak_flops=peak_flops,
        utilisation=achieved / peak_flops if peak_flops else None,
        peak_memory_bytes=peak_memory_bytes(),
        device_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )
