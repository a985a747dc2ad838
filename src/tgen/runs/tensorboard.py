"""TensorBoard events of a run.

Needs the package tensorboardX, which writes the format without TensorBoard or TensorFlow.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tgen.errors import UsageError
from tgen.reports.training import EvalReport, EventsReport, RunReport, SampleReport, StepReport


def require() -> None:
    """Raise UsageError if tensorboardX is missing; call it before training."""
    if find_spec("tensorboardX") is None:
        raise UsageError(
            "--tensorboard: the package tensorboardX is missing",
            "pip install 'tgen-lm[tensorboard]'",
        )


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


class EventFile:
    """An event file written without the package's thread, which a full disk would kill; waiting
    for it would then never end.

    TensorBoard no longer shows events of steps after `after_step` from earlier sessions.
    """

    name = "TensorBoard's log"

    def __init__(self, folder: Path, after_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.record_writer import directory_check

        directory_check(str(folder))
        # The file name contains the second; the step makes it unique after a quick resume.
        self._file = EventsWriter(str(folder / "events"), f".after-{after_step}")
        self._write(after_step + 1, session_log={"status": "START"})

    def add(self, report: RunReport) -> None:
        """Write the numbers of a report; flush at evaluations and samples."""
        from tensorboardX.summary import scalar, text

        if isinstance(report, StepReport | EvalReport):
            for name, value in scalars(report).items():
                self._write(report.step, summary=scalar(name, value))
        elif isinstance(report, SampleReport):
            self._write(report.step, summary=text("sample", _as_code(report)))
        if not isinstance(report, StepReport):
            self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, **content))


def _as_code(sample: SampleReport) -> str:
    """Format a sample as a Markdown code block, as TensorBoard renders text."""
    text = (sample.prompt + sample.text).decode(errors="replace")
    return "".join(f"    {line}\n" for line in text.splitlines())
