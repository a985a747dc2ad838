"""The learning-rate schedule: linear warmup, constant, linear decay to 0, within the time budget.

With `steps`, the last step and the start of the decay are known in advance. With `minutes` the
clock decides them during the run, or `max_steps` if that is earlier; they are stored in `Progress`,
so that a resumed run repeats them, unless the machine has become slower: then the run ends earlier.
"""

from tgen.config.training import ResolvedTrainConfig
from tgen.planning.side_work import EXIT_SECONDS
from tgen.training.state import Progress

_OVERTIME = 1.02  # times the minutes: a run that would end later than this takes fewer steps


def lr_factor(progress: Progress, config: ResolvedTrainConfig, step: int) -> float:
    """Return the factor of the learning rates at `step`, from 0 to 1."""
    factor = progress.learning_rate_scale * min(1.0, (step + 1) / (config.warmup_steps + 1))
    start, end = progress.decay_start, progress.total_steps
    if start is None or end is None or step < start:
        return factor
    return factor * max(0.0, (end - step) / (end - start + 1))


def start_decay(progress: Progress, steps: int) -> None:
    """Decay the learning rate from this step on, over `steps` steps."""
    _set_end(progress, progress.step, progress.step + max(1, steps))


def _set_end(progress: Progress, decay_start: int, total_steps: int) -> None:
    """Set the schedule by the clock, and note it for a repetition of the run."""
    progress.decay_start, progress.total_steps = decay_start, total_steps
    progress.end_history = [*progress.end_history, [progress.step, decay_start, total_steps]]


def in_decay(progress: Progress) -> bool:
    """Whether the learning rate decays at this step."""
    return progress.decay_start is not None and progress.step >= progress.decay_start


def update_schedule(progress: Progress, config: ResolvedTrainConfig) -> None:
    """Fix the first step of the decay and the last step as soon as both are known."""
    if config.steps is not None:
        for step, decay_start, total_steps in progress.ends_to_repeat:
            if step == progress.step:
                progress.decay_start, progress.total_steps = decay_start, total_steps
        if progress.total_steps is None and not progress.ends_to_repeat:
            progress.total_steps = config.steps
            progress.decay_start = round(config.steps * (1 - config.decay_fraction))
        return
    if progress.total_steps is None and config.max_steps is not None:
        constant_steps = round(config.max_steps * (1 - config.decay_fraction))
        if progress.step >= min(constant_steps, config.max_steps - 1):
            start_decay(progress, config.max_steps - progress.step)
    if progress.steps_taken == 0:
        return
    time_left = seconds_left(progress, config)
    if progress.total_steps is None:
        training_seconds = progress.seconds + time_left - progress.setup_seconds
        if time_left <= config.decay_fraction * training_seconds:
            start_decay(progress, int(time_left / seconds_per_step(progress)))
    else:  # the machine may be slower than it was when the last step was fixed
        needed = (progress.total_steps - progress.step) * seconds_per_step(progress)
        if progress.seconds + needed > _OVERTIME * (progress.seconds + time_left):
            steps = int(max(0.0, time_left) / seconds_per_step(progress))
            start = progress.step if progress.decay_start is None else progress.decay_start
            _set_end(progress, start, progress.step + max(1, steps))


def end_in_time(progress: Progress, config: ResolvedTrainConfig) -> None:
    """End after this step if the minutes are over before the decay could start."""
    step = progress.step
    is_late = seconds_left(progress, config) < seconds_per_step(progress) / 2
    if is_late and config.steps is None and progress.total_steps is None:
        _set_end(progress, step, step)
    if [step, step, step] in progress.ends_to_repeat:
        progress.decay_start = progress.total_steps = step


def seconds_per_step(progress: Progress) -> float:
    """Return the mean seconds per step so far, evaluations included."""
    return (progress.seconds - progress.setup_seconds) / max(1, progress.steps_taken)


def seconds_left(progress: Progress, config: ResolvedTrainConfig) -> float:
    """Return the part of the minutes left for steps, before the last evaluation and the saving."""
    # After the last step: an evaluation with all that belongs to it, and about as much once more.
    closing = progress.closing_seconds
    if progress.planned_step_seconds and progress.steps_taken:
        closing *= max(1.0, seconds_per_step(progress) / progress.planned_step_seconds)
    evaluation = progress.evaluation_seconds + progress.saving_seconds
    closing = max(closing, 2 * evaluation) + EXIT_SECONDS
    return config.minutes * 60 - closing - progress.seconds
