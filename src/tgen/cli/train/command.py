"""`tgen train`: a plan, then a progress bar, then a model directory."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import typer

from tgen import distributed, runs
from tgen.cli import console
from tgen.cli.distributed import all_ranks
from tgen.cli.options import (
    Reader,
    json_option,
    make_command,
    nested,
    parse_count,
    parse_settings,
    parse_size,
    quiet_option,
    reading_options,
)
from tgen.cli.signals import StopSignal
from tgen.config.input_files import PANEL, Reading
from tgen.config.option import option
from tgen.config.training import TrainConfig
from tgen.errors import UsageError
from tgen.reports.training import PhaseReport, PlanReport, RunReport
from tgen.runs import ResumeRequest, RunRequest
from tgen.runs.output_folder import default_output

PANELS = ("Data and tokenizer", PANEL, "Resume")
_RESUMABLE = {one.name for one in fields(ResumeRequest)}
_FIXED = [one.name for one in fields(RunRequest) if one.name not in _RESUMABLE]


def read_out(text: str) -> Path:
    """Return the path of --out; raise UsageError for an empty one."""
    if not text:
        raise UsageError("--out is empty", "name a directory, or remove --out")
    return Path(text)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `tgen train`; `run` and `config` have those that were given."""

    config: dict[str, Any] = nested(TrainConfig)
    reading: dict[str, Any] = reading_options()
    run: dict[str, Any] = nested(
        RunRequest,
        out=Reader(str, read_out),
        overrides=Reader(list[str], parse_settings),
        parameters=Reader(str, partial(parse_count, "--parameters")),
        device_memory=Reader(str, partial(parse_size, "--device-memory")),
    )
    dry_run: bool = option(False, "Print the plan and exit.", "--dry-run")
    resume: bool = option(
        False,
        "Resume the run in --out; --from names the base of a LoRA run if it has moved.",
        "--resume",
        panel="Resume",
        excludes=" ".join(["dry_run", *_FIXED]),
        hint="remove one of them, or start a new run with another --out",
    )
    override: bool = option(
        False,
        "Let --resume change the corpus, --minutes, --steps, --seed or --set.",
        "--override",
        panel="Resume",
        needs="resume",
    )
    json_output: bool = json_option("Write every report to stdout, one JSON object per line.")
    quiet: bool = quiet_option()

    def __post_init__(self) -> None:
        if not (self.resume or self.paths or "from_run" in self.run):
            raise UsageError("no corpus", "name a text file, or - for stdin")

    @property
    def paths(self) -> list[str]:
        """The corpus paths as given."""
        return list(self.run.get("corpus", ()))

    @property
    def out(self) -> Path:
        """The directory to write."""
        source: Path | None = self.run.get("from_run")
        repeated = Path("models") / f"{source.resolve().name}-repeated" if source else None
        return self.run.get("out") or repeated or default_output(self.paths)

    def run_request(self, *, began: float) -> RunRequest:
        """Return the request for a new run, whose minutes count from `began`."""
        given = self.run | {"out": self.out}
        return RunRequest(
            **given,
            train=TrainConfig(**self.config),
            reading=Reading(**self.reading),
            began=began,
            command=[*console.command_words],
        )

    def resume_request(self) -> ResumeRequest:
        """Return the request to resume."""
        given = {name: value for name, value in self.run.items() if name in _RESUMABLE}
        given["out"] = self.out
        return ResumeRequest(
            **given, settings=self.config, reading=self.reading, override=self.override
        )


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
        all_ranks(options.paths) as shows,
        TrainingProgress(
            json_lines=options.json_output and shows, plan_only=options.dry_run
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
