"""Duration of a training step and its utilization of the machine.

The steps are those of `tgen train`, on random tokens. Evaluation, samples and checkpoints are
excluded. A warmup block of steps comes first, then the timed blocks; on a GPU each block ends when
its losses arrive.

FLOPs per token are counted as in Kaplan et al. (2020, section 2.1): 6 per matmul parameter (2
forward, 4 backward; embedding lookups are free). Attention adds 12 per layer, head, head dimension
and key, as in PaLM (Chowdhery et al. 2022, appendix B), but the number of keys is half the context,
because of the causal mask, or less in a sliding window; PaLM counts all of it. Other work and
recomputation do not count.
"""

import time
from collections.abc import Iterator

import torch

from tgen.benchmark.statistics import timing
from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.machine.device import choose_device, memory_bytes, set_threads
from tgen.machine.memory import peak_memory_bytes
from tgen.planning.costs import flops_per_token
from tgen.planning.memory import check_memory
from tgen.reports.benchmark import TrainingStepReport, TrialReport
from tgen.training.machine_speed import RandomRun


def measure_training_step(
    model: ModelConfig,
    *,
    config: ResolvedTrainConfig | None = None,
    steps: int = 10,
    trials: int = 5,
    device: str = "auto",
    threads: int | None = None,
    peak_flops: float | None = None,
) -> Iterator[TrialReport | TrainingStepReport]:
    """Time `trials` blocks of `steps` steps (on a GPU possibly more) after a warmup block.

    `config` defines the step, by default 16 windows as in the plan. `peak_flops` is the machine's
    peak FLOP/s. Raises UsageError for a missing device, or a step that needs more memory than the
    device has.
    """
    config = config or ResolvedTrainConfig()
    target = choose_device(device)
    check_memory(model, config, model.context_length, memory_bytes(target))
    set_threads(threads)
    on_gpu = target.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(target)
    run = RandomRun(model, config, target)
    seconds, n_timed = [], 0
    for trial in range(trials + 1):
        began = time.perf_counter()
        n_steps = run.advance(steps)
        if trial > 0:
            seconds.append((time.perf_counter() - began) / n_steps)
            n_timed += n_steps
        yield TrialReport(trial=trial, trials=trials)
    step = timing(seconds)
    tokens = config.batch_size * model.context_length
    speed = tokens / step.median
    flops_per_second = speed * flops_per_token(model)
    yield TrainingStepReport(
        device=target.type,
        precision=config.precision,
        steps=n_timed,
        tokens_per_step=tokens,
        seconds=step,
        tokens_per_second=speed,
        flops_per_token=flops_per_token(model),
        flops_per_second=flops_per_second,
        peak_flops=peak_flops,
        utilization=flops_per_second / peak_flops if peak_flops else None,
        peak_memory_bytes=peak_memory_bytes(),
        device_memory_bytes=torch.cuda.max_memory_allocated(target) if on_gpu else None,
    )
