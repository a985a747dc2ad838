"""A training run, from the corpus to the model directory, as an iterator of reports.

    for report in start(RunRequest(corpus=["corpus.txt"], out=Path("models/corpus"))): ...

When an EvalReport or the DoneReport arrives, the newest state and the best weights are on disk,
unless a SavingReport reports a failure; with FSDP and HSDP, only the DoneReport promises this. The
run's directory is locked before torch is imported.

With several ranks, inside `distributed.join_process_group`, every rank iterates. Only rank 0 locks
the directory and writes to it, except that each rank of FSDP writes its rows of a state.
"""

from collections.abc import Callable, Generator

from tgen import distributed
from tgen.errors import UsageError
from tgen.reports.training import PhaseReport, PlanReport, RunReport
from tgen.runs.output_folder import (
    check_out_is_free,
    check_out_is_not_source,
    check_parallel,
    check_run_exists,
    has_lock,
    is_restarted,
    lock_run,
)
from tgen.runs.request import ResumeRequest, RunRequest
from tgen.runs.uninterrupted import defer_signals

__all__ = ["ResumeRequest", "RunRequest", "dry_run_reports", "resume", "start"]


def start(
    request: RunRequest, *, stopped: Callable[[], bool] = lambda: False
) -> Generator[RunReport, None, None]:
    """Train a new model in `request.out`; save and stop when `stopped()` is true after a step.

    When torchrun has restarted the ranks after a failure, resume the run that they started.
    Raise CorpusError, UsageError, TrainingError or LockedError.
    """
    check_parallel(request.parallel)
    if is_restarted(request.out):
        resumed = ResumeRequest(
            out=request.out,
            parallel=request.parallel,
            device=request.device,
            threads=request.threads,
        )
        yield from resume(resumed, stopped=stopped)
        return
    check_out_is_not_source(request)
    if distributed.is_rank_zero() and not has_lock(request.out):  # otherwise check the lock first
        check_out_is_free(request.out, overwrite=request.overwrite)
    with lock_run(request.out):
        if distributed.is_rank_zero():
            check_out_is_free(request.out, overwrite=request.overwrite)
        with defer_signals():
            from tgen.runs import session

        yield from session.start(request, stopped=stopped)


def resume(
    request: ResumeRequest, *, stopped: Callable[[], bool] = lambda: False
) -> Generator[RunReport, None, None]:
    """Resume the run in `request.out` exactly as if it had never stopped.

    The corpus is optional. Raise TrainingError with the difference if the corpus has changed or a
    setting differs, unless `request.override`.
    """
    check_parallel(request.parallel)
    check_run_exists(request.out)
    with lock_run(request.out):
        with defer_signals():
            from tgen.runs import session

        yield from session.resume(request, stopped=stopped)


def dry_run_reports(request: RunRequest) -> Generator[PhaseReport | PlanReport, None, None]:
    """Yield the phases of planning, and the plan of `start`, without writing files; ignore an
    existing model."""
    check_parallel(request.parallel)
    if distributed.ranks().world_size > 1:
        raise UsageError(
            "--dry-run does not support multiple processes",
            "run it without torchrun; --ranks N plans for N processes",
        )
    check_out_is_not_source(request)
    check_out_is_free(request.out, overwrite=True)
    with defer_signals():
        from tgen.runs import session

    yield from session.dry_run(request)
