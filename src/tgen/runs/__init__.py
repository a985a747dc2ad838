"""One training run from the corpus to the model directory, as an iterator of reports.

    for report in start(RunRequest(corpus=["corpus.txt"], out=Path("models/corpus"))): ...

The newest state and the best weights are on disk whenever an EvalReport or the DoneReport arrives,
unless a SavingReport said that the disk refused them. The run's directory is locked before torch is
imported.

Of ranks that share a run, inside `distributed.join_process_group`, each iterates over it; the first owns the
directory, and is the only one to write there.
"""

from collections.abc import Callable, Iterator

from tgen import distributed
from tgen.errors import UsageError
from tgen.reports import PlanReport, RunReport
from tgen.runs.request import ResumeRequest, RunRequest
from tgen.runs.run_lock import (
    check_begun,
    check_free,
    check_launched,
    defer_signals,
    may_be_owned,
    run_lock,
)

__all__ = ["ResumeRequest", "RunRequest", "dry_run", "resume", "start"]


def start(
    request: RunRequest, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[RunReport]:
    """Trains a new model in `request.out`; `stopped` is asked after every step.

    Raises CorpusError, UsageError, TrainingError, LockedError.
    """
    check_launched(request.parallel)
    if distributed.is_rank_zero() and not may_be_owned(request.out):  # or its owner is named first
        check_free(request.out, overwrite=request.overwrite)
    with run_lock(request.out):
        if distributed.is_rank_zero():
            check_free(request.out, overwrite=request.overwrite)
        with defer_signals():
            from tgen.runs import session

        yield from session.start(request, stopped=stopped)


def resume(
    request: ResumeRequest, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[RunReport]:
    """Goes on with the run in `request.out`, exactly as if it had never stopped.

    The corpus need not be there any more; if it is named and has changed, or another setting is
    asked for, TrainingError with the difference, unless that is to be so.
    """
    check_launched(request.parallel)
    check_begun(request.out)
    with run_lock(request.out):
        with defer_signals():
            from tgen.runs import session

        yield from session.resume(request, stopped=stopped)


def dry_run(request: RunRequest) -> PlanReport:
    """What `start` would do; nothing is written, so what is already there does not matter."""
    check_launched(request.parallel)
    if distributed.ranks().world_size > 1:
        raise UsageError("--dry-run on several ranks", "leave torchrun away: --ranks N plans for N")
    check_free(request.out, overwrite=True)
    with defer_signals():
        from tgen.runs import session

    return session.dry_run(request)
