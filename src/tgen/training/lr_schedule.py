"""The learning-rate schedule: linear warmup, constant, linear decay to 0.

`time_budget` decides when the decay starts; `Progress` stores it.
"""

from tgen.config.training import ResolvedTrainConfig
from tgen.training.state import Progress


def lr_factor(progress: Progress, config: ResolvedTrainConfig, step: int) -> float:
    """Return the factor of the learning rates at `step`, from 0 to 1."""
    factor = progress.learning_rate_scale * min(1.0, (step + 1) / (config.warmup_steps + 1))
    start, end = progress.decay_start, progress.total_steps
    if start is None or end is None or step < start:
        return factor
    return factor * max(0.0, (end - step) / (end - start + 1))


def start_decay(progress: Progress, steps: int) -> None:
    """Decay the learning rate from this step on, over `steps` steps."""
    progress.decay_start = progress.step
    progress.total_steps = progress.step + max(1, steps)


def in_decay(progress: Progress) -> bool:
    """Whether the learning rate decays at this step."""
    return progress.decay_start is not None and progress.step >= progress.decay_start
