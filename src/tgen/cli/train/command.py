"""`tgen train`: a plan, then a progress bar, then a model directory."""

import time
from collections.abc import Iterator

import typer

from tgen import distributed, runs
from tgen.cli import console
from tgen.cli.distributed import all_ranks
from tgen.cli.options import make_command
from tgen.cli.signals import StopSignal
from tgen.cli.train.options import PANELS, TrainOptions
from tgen.errors import UsageError
from tgen.reports.training import PhaseReport, PlanReport, RunReport


def train(options: TrainOptions) -> None:
    """Train a model on your text.

    tgen picks the model size and hyperparameters from the corpus size, the time budget and this
    machine's speed, and prints them with reasons; --dry-run prints the plan and exits. The command
    writes a directory that `tgen generate` and transformers load, with the weights that had the
    best validation loss. Ctrl-C saves the run and prints the command that resumes it.
    """
    stop_signal = StopSignal()
    try:
        _train(options, stop_signal)
    except UsageError as error:
        if error.field in options.run.get("overrides", {}):
            raise UsageError(f"--set {error.message}", error.hint) from None
        raise
    finally:
        stop_signal.explain()


def _train(options: TrainOptions, stop_signal: StopSignal) -> None:
    # Starting counts, too: its CPU time, as the process is older if a shell became it by exec.
    began = time.monotonic() - time.process_time()
    if options.json_output:
        console.require_stdout()
    from tgen.cli.train.progress import TrainingProgress

    reports = _start(options, stop_signal, began)
    with (
        all_ranks(options.paths, quiet=options.quiet) as shows,
        TrainingProgress(
            quiet=options.quiet or not shows,
            json_lines=options.json_output and shows,
            plan_only=options.dry_run,
        ) as progress,
    ):
        for report in reports:
            if isinstance(report, PhaseReport):
                stop_signal.has_started |= report.saved
            elif not isinstance(report, PlanReport):
                stop_signal.is_training = stop_signal.has_started = True
            progress.show(report)
        # All ranks exit with the signal that any of them received.
        number = max(distributed.all_gather(stop_signal.number))
    if number:
        raise typer.Exit(128 + number)


def _start(options: TrainOptions, stop_signal: StopSignal, began: float) -> Iterator[RunReport]:
    if options.resume:
        return runs.resume(options.resume_request(), stopped=stop_signal.is_requested)
    request = options.run_request(began=began)
    if options.dry_run:
        return runs.dry_run_reports(request)
    return runs.start(request, stopped=stop_signal.is_requested)


command = make_command(train, TrainOptions, PANELS)
