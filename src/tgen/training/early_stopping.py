"""When a run's learning rate falls and when it ends: the decisions, kept in its progress.

The rate rises, stays, and falls to 0. With `minutes` the clock decides at which step the fall
begins. It begins earlier, and from the best step, where held-out text is no longer predicted
better: a small text has then been learnt, and more steps would only learn it by heart.
"""

from tgen.config import TrainConfig
from tgen.training.state import Progress

_LEAVING_SECONDS = 0.9  # for the process to end
_LATE = 1.02  # of the minutes: a run that would end later than this takes fewer steps


def begin_decay_if_due(progress: Progress, config: TrainConfig) -> None:
    """Fixes the last step, and the one where the decay begins, as soon as both can be known."""
    if config.steps is not None:
        if progress.total_steps is None:
            progress.total_steps = config.steps
            progress.decay_start = round(config.steps * (1 - config.decay_fraction))
    elif progress.total_steps is None:
        time_left = _seconds_to_train(progress, config)
        begins = config.decay_fraction * (progress.seconds + time_left - progress.setup_seconds)
        if progress.steps_taken > 0 and time_left <= begins:
            _begin_decay(progress, int(time_left / seconds_per_step(progress)))
    elif progress.steps_taken > 0:
        # The machine has become slower than it was when the end was fixed.
        time_left = _seconds_to_train(progress, config)
        needed = (progress.total_steps - progress.step) * seconds_per_step(progress)
        if progress.seconds + needed > _LATE * (progress.seconds + time_left):
            steps = int(max(0.0, time_left) / seconds_per_step(progress))
            progress.total_steps = progress.step + max(1, steps)


def evaluation_is_due(progress: Progress, config: TrainConfig) -> bool:
    """Whether an evaluation (or, with nothing held out, a save) follows the step just taken."""
    assert config.eval_every is not None  # the plan has chosen
    return progress.step % config.eval_every == 0 or progress.step == progress.total_steps


def note_evaluation(progress: Progress, config: TrainConfig, bits_per_byte: float) -> bool:
    """Whether this is the best so far. After `patience` evaluations that are not, the run is to go
    back to the best one and decay from there; after as many in the decay, it ends."""
    best = progress.best_bits_per_byte
    if best is None or bits_per_byte < best:
        progress.best_bits_per_byte, progress.best_step = bits_per_byte, progress.step
        progress.not_better = 0
        return True
    if decays(progress) and not progress.in_decay:
        progress.in_decay, progress.not_better = True, 0
    progress.not_better += 1
    if config.patience and progress.not_better >= config.patience:
        if decays(progress):
            progress.total_steps = progress.step
        else:
            progress.go_back = True
        progress.stopped_early = True
    return False


def reset_best(progress: Progress, corpus_changes: int) -> None:
    """Where the corpus has changed since, forgets what was best: its held-out text is another, and
    the next evaluation the first."""
    if progress.corpus_changes != corpus_changes:
        progress.corpus_changes = corpus_changes
        progress.best_bits_per_byte, progress.best_step, progress.not_better = None, 0, 0
        progress.in_decay = progress.go_back = False


def begin_early_decay(progress: Progress, config: TrainConfig) -> None:
    """Lets the rate fall from this step on, since more steps made nothing better: the best one or,
    where that could not be saved, one after it."""
    steps = round(progress.step * config.decay_fraction / (1 - config.decay_fraction))
    if config.steps is None:
        left = int(_seconds_to_train(progress, config) / seconds_per_step(progress))
    else:
        left = config.steps - progress.step
    progress.stopped_early, progress.go_back, progress.not_better = True, False, 0
    _begin_decay(progress, min(steps, left))


def reset_end(progress: Progress, end_changes: int) -> None:
    """Another end has been asked for, so often by now, than the one that these counters know."""
    progress.end_changes = end_changes
    progress.decay_start = progress.total_steps = None
    progress.go_back = progress.stopped_early = progress.in_decay = False
    progress.not_better = 0


def seconds_per_step(progress: Progress) -> float:
    """The mean so far, evaluations and all."""
    return (progress.seconds - progress.setup_seconds) / max(1, progress.steps_taken)


def decays(progress: Progress) -> bool:
    """Whether the rate falls at this step."""
    return progress.decay_start is not None and progress.step >= progress.decay_start


def _begin_decay(progress: Progress, steps: int) -> None:
    progress.decay_start = progress.step
    progress.total_steps = progress.step + max(1, steps)


def _seconds_to_train(progress: Progress, config: TrainConfig) -> float:
    """Of the minutes, what is left before the last evaluation and the saving must begin."""
    # After the last step: an evaluation with all that goes with it, and about as much once more.
    closing = max(progress.closing_seconds, 2 * progress.evaluation_seconds) + _LEAVING_SECONDS
    return config.minutes * 60 - closing - progress.seconds
