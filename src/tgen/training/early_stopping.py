"""Early stopping, once validation loss is worse than it was.

After `patience` evaluations in a row that are each worse than the one before and significantly
worse than the best, `record_evaluation` sets `progress.restore_best`. The training loop then ends,
the caller restores the best checkpoint, and `decay_from_best` decays the learning rate from there:
more steps would only memorize a small corpus. After as many such evaluations during the decay, the
run ends. At a constant learning rate, the loss fluctuates by more than the standard error, but it
does not rise several times in a row.

Where nothing is held out and every row is a prompt with an answer, `record_answers` ends the run
once all answers are reproduced in two evaluations in a row.
"""

import statistics
from collections.abc import Sequence

from tgen.config.training import ResolvedTrainConfig
from tgen.planning.fine_tuning import MAX_MEMORIZED_ROWS
from tgen.training.evaluation import Evaluation
from tgen.training.schedule import in_decay, seconds_left, seconds_per_step, start_decay
from tgen.training.state import Progress

_EXACT_EVALS = 2  # in a row: once may be chance
_MIN_SCALE = 1 / 16  # of the learning rates, when fewer answers are exact


def record_evaluation(
    progress: Progress,
    config: ResolvedTrainConfig,
    evaluation: Evaluation,
) -> bool:
    """Return whether this evaluation is the best so far. Count it toward `patience` if it is worse
    than the previous one, and than the best by more than the standard error of the difference."""
    bits_per_byte, previous = evaluation.bits_per_byte, progress.last_bits_per_byte
    progress.last_bits_per_byte = bits_per_byte
    best = progress.best_bits_per_byte
    if best is None or bits_per_byte < best:
        progress.best_bits_per_byte, progress.best_step = bits_per_byte, progress.step
        progress.best_parts, progress.worse_evals = evaluation.parts, 0
        return True
    if in_decay(progress) and not progress.evaluated_in_decay:
        progress.evaluated_in_decay, progress.worse_evals = True, 0
    rises = previous is None or bits_per_byte >= previous
    worse = rises and _is_significant(evaluation.parts, progress.best_parts)
    progress.worse_evals = progress.worse_evals + 1 if worse else 0
    if config.patience and progress.worse_evals >= config.patience:
        progress.stopped_early = True
        if in_decay(progress):
            progress.total_steps = progress.step
        else:
            progress.restore_best = True
    return False


def record_answers(progress: Progress, n_exact: int, n_answers: int) -> None:
    """Count an evaluation of the answers; end the run after two in a row that are all exact.

    If few answers are to be memorized and fewer are exact than before, halve the learning rates:
    at constant rates, steps that learn the last ones undo others.
    """
    progress.exact_evals = progress.exact_evals + 1 if n_exact == n_answers else 0
    if n_answers <= MAX_MEMORIZED_ROWS and n_exact < progress.most_exact:
        progress.learning_rate_scale = max(_MIN_SCALE, progress.learning_rate_scale / 2)
    progress.most_exact = max(progress.most_exact, n_exact)
    if progress.exact_evals >= _EXACT_EVALS:
        progress.total_steps = progress.step


def has_learned(progress: Progress) -> bool:
    """Whether every answer was reproduced in enough evaluations in a row."""
    return progress.exact_evals >= _EXACT_EVALS


def _is_significant(losses: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the means of two lists, of the same parts of a text, differ by more than the standard
    error of the difference; True if it is unknown."""
    n = len(losses)
    if n < 2 or len(best) != n:
        return True
    differences = [a - b for a, b in zip(losses, best, strict=True)]
    return bool(sum(differences) > n**0.5 * statistics.stdev(differences))


def decay_from_best(progress: Progress, config: ResolvedTrainConfig) -> None:
    """Decay the learning rate from the restored checkpoint: the best one or, where that could not
    be saved, one after it."""
    steps = round(progress.step * config.decay_fraction / (1 - config.decay_fraction))
    if config.steps is None:
        remaining = int(seconds_left(progress, config) / seconds_per_step(progress))
    else:
        remaining = config.steps - progress.step
    progress.stopped_early, progress.restore_best, progress.worse_evals = True, False, 0
    start_decay(progress, min(steps, remaining))


def reset_best(progress: Progress, corpus_changes: int) -> None:
    """Forget the best evaluation if the corpus, and so the held-out text, has changed since."""
    if progress.corpus_changes != corpus_changes:
        progress.corpus_changes = corpus_changes
        progress.best_bits_per_byte, progress.best_step, progress.worse_evals = None, 0, 0
        progress.best_parts, progress.last_bits_per_byte = [], None
        progress.evaluated_in_decay = progress.restore_best = False
        progress.exact_evals = progress.most_exact = 0


def reset_end(progress: Progress, end_changes: int) -> None:
    """Forget the end of the run after --steps, --minutes or decay_fraction was overridden;
    `end_changes` counts how often that happened."""
    progress.end_changes = end_changes
    progress.decay_start = progress.total_steps = None
    progress.end_history, progress.ends_to_repeat = [], []
    progress.restore_best = progress.stopped_early = progress.evaluated_in_decay = False
    progress.worse_evals = progress.exact_evals = 0
