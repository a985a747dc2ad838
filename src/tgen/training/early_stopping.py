"""Early stopping, once validation loss stops improving.

After `patience` evaluations without improvement, `record_evaluation` sets `progress.restore_best`.
The training loop then ends, the caller restores the best checkpoint, and `decay_from_best` decays
the learning rate from there: more steps would only memorize a small corpus. After as many
evaluations without improvement during the decay, the run ends.
"""

from tgen.config import ResolvedTrainConfig
from tgen.training.lr_schedule import in_decay, start_decay
from tgen.training.state import Progress
from tgen.training.time_budget import seconds_left, seconds_per_step


def record_evaluation(
    progress: Progress, config: ResolvedTrainConfig, bits_per_byte: float
) -> bool:
    """Return whether this evaluation is the best so far; otherwise count toward `patience`."""
    best = progress.best_bits_per_byte
    if best is None or bits_per_byte < best:
        progress.best_bits_per_byte, progress.best_step = bits_per_byte, progress.step
        progress.evals_since_best = 0
        return True
    if in_decay(progress) and not progress.evaluated_in_decay:
        progress.evaluated_in_decay, progress.evals_since_best = True, 0
    progress.evals_since_best += 1
    if config.patience and progress.evals_since_best >= config.patience:
        progress.stopped_early = True
        if in_decay(progress):
            progress.total_steps = progress.step
        else:
            progress.restore_best = True
    return False


def decay_from_best(progress: Progress, config: ResolvedTrainConfig) -> None:
    """Decay the learning rate from the restored checkpoint: the best one or, where that could not
    be saved, one after it."""
    steps = round(progress.step * config.decay_fraction / (1 - config.decay_fraction))
    if config.steps is None:
        remaining = int(seconds_left(progress, config) / seconds_per_step(progress))
    else:
        remaining = config.steps - progress.step
    progress.stopped_early, progress.restore_best, progress.evals_since_best = True, False, 0
    start_decay(progress, min(steps, remaining))


def reset_best(progress: Progress, corpus_changes: int) -> None:
    """Forget the best evaluation if the corpus, and so the held-out text, has changed since."""
    if progress.corpus_changes != corpus_changes:
        progress.corpus_changes = corpus_changes
        progress.best_bits_per_byte, progress.best_step, progress.evals_since_best = None, 0, 0
        progress.evaluated_in_decay = progress.restore_best = False


def reset_end(progress: Progress, end_changes: int) -> None:
    """Forget the end of the run after --steps, --minutes or decay_fraction was overridden;
    `end_changes` counts how often that happened."""
    progress.end_changes = end_changes
    progress.decay_start = progress.total_steps = None
    progress.restore_best = progress.stopped_early = progress.evaluated_in_decay = False
    progress.evals_since_best = 0
