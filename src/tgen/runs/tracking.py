"""Metrics of a run for other programs: Weights & Biases and trackio, through their own libraries,
and TensorBoard, through `tensorboard`. If a log fails, training continues without it.

The libraries write to local files; only `wandb:online` lets its library use the network. Their
defaults say where the files are: WANDB_DIR, TRACKIO_DIR.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any, Protocol

from tgen.errors import UsageError
from tgen.planning.costs import n_parameters
from tgen.reports.training import EvalReport, EventsReport, RunReport, StepReport
from tgen.runs.request import Log
from tgen.runs.run_record import RunRecord

_PROJECT = "tgen"


class EventLog(Protocol):
    """A log of the numbers of reports; its methods raise OSError."""

    name: str

    def add(self, report: RunReport) -> None:
        """Write the numbers of a report."""

    def close(self) -> None:
        """Write what is buffered, and end."""


def write_events(
    reports: Iterator[RunReport], open_log: Callable[[], EventLog], *, after_step: int
) -> Iterator[RunReport]:
    """Yield every report after writing its numbers to the log, which is opened for the first.

    If writing fails, an EventsReport says so and the reports continue without events.
    """
    events: EventLog | None = None
    step, failed = after_step, False
    try:
        for report in reports:
            reason = ""
            try:
                if not failed:
                    events = events or open_log()
                    events.add(report)
            except OSError as error:
                # No retry: events after half an event cannot be read.
                failed, reason = True, error.strerror or str(error)
            yield report
            step = getattr(report, "step", step)
            if reason:
                name = events.name if events else "the log of metrics"
                yield EventsReport(step=step, failed=reason, name=name)
    finally:
        if events is not None:
            with suppress(OSError):
                events.close()


def scalars(report: StepReport | EvalReport) -> dict[str, float]:
    """Return the numbers of a report by their names."""
    if isinstance(report, EvalReport):
        validation = {"loss": report.loss, "bits_per_byte": report.bits_per_byte}
        return {f"{name}/validation": value for name, value in validation.items()}
    loss = {} if report.loss is None else {"loss/train": report.loss}
    rate, speed = report.learning_rate, report.tokens_per_second
    return {**loss, "learning_rate": rate, "tokens_per_second": speed}


def require(log: Log) -> None:
    """Raise UsageError if the library is missing, or has no login that it needs; call it before
    training."""
    package, _, mode = log.partition(":")
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a directory with logs may have its name
        raise UsageError(f"--log {log}: the package {package} is missing", f"pip install {package}")
    if mode and not _has_login(_import(log)):
        raise UsageError(f"--log {log}: wandb is not logged in", "run: wandb login")


def _has_login(library: Any) -> bool:
    """Return whether wandb has a key, for which it would ask otherwise."""
    try:
        return bool(library.login(prompt=False, verify=False))
    except TypeError:  # an older version
        return bool(library.api.api_key)


class Tracker:
    """One session of a run in the library's log; a later session continues it."""

    def __init__(self, log: Log, record: RunRecord, title: str, after_step: int) -> None:
        """Open the log; raise OSError if the library fails."""
        self.name = f"the log of {log}"
        plan, self._library = record.plan, _import(log)
        config = asdict(plan.model) | asdict(plan.train) | {"parameters": n_parameters(plan.model)}
        values: dict[str, Any] = {"project": _PROJECT, "name": title, "config": config}
        if log == "trackio":  # knows runs by their names, which other runs may have had
            values["resume"] = "allow" if after_step else "never"
        else:
            mode = "online" if log.endswith(":online") else "offline"
            values |= {"id": record.run_id, "resume": "allow", "mode": mode}
        _call(self._library.init, **values)

    def add(self, report: RunReport) -> None:
        """Log the numbers of a report."""
        if isinstance(report, StepReport | EvalReport):
            _call(self._library.log, scalars(report), step=report.step)

    def close(self) -> None:
        """Write what is buffered."""
        _call(self._library.finish)


def _import(log: Log) -> Any:
    if not log.endswith(":online"):  # reports of the library's own errors, and usage statistics
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "GRADIO_ANALYTICS_ENABLED": "False"}
    os.environ.setdefault("WANDB_SILENT", "true")
    with redirect_stdout(StringIO()):
        return import_module(log.partition(":")[0])


def _call(function: Any, *values: Any, **options: Any) -> Any:
    """Call the library, which prints on stdout; its errors become OSError."""
    try:
        with redirect_stdout(StringIO()):
            return function(*values, **options)
    except Exception as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error
