"""TensorBoard events of a run.

Needs the package tensorboardX, which writes the format without TensorBoard or TensorFlow.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tgen.errors import UsageError
from tgen.reports.training import EvalReport, EventsReport, RunReport, SampleReport, StepReport


def require() -> None:
    """Raise UsageError if tensorboardX is missing; call it before training."""
    if find_spec("tensorboardX") is None:
        raise UsageError(
            "--tensorboard: the package tensorboardX is missing",
            "pip install 'tgen-lm[tensorboard]'",
        )


def write_events(
    reports: Iterator[RunReport], folder: Path, *, after_step: int
) -> Iterator[RunReport]:
    """Yield every report after writing its numbers as events in `folder`.

    TensorBoard no longer shows events of steps after `after_step` from earlier sessions. If writing
    fails, an EventsReport says so and the reports continue without events.
    """
    require()
    events: _EventFile | None = None
    step, failed = after_step, False
    try:
        for report in reports:
            reason = ""
            try:
                if not failed:
                    events = events or _EventFile(folder, after_step)
                    events.add(report)
            except OSError as error:
                # No retry: events after half an event cannot be read.
                failed, reason = True, error.strerror or str(error)
            yield report
            step = getattr(report, "step", step)
            if reason:
                yield EventsReport(step=step, failed=reason)
    finally:
        if events is not None:
            with suppress(OSError):
                events.close()


class _EventFile:
    """An event file written without the package's thread, which a full disk would kill; waiting
    for it would then never end."""

    def __init__(self, folder: Path, after_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.record_writer import directory_check

        directory_check(str(folder))
        # The file name contains the second; the step makes it unique after a quick resume.
        self._file = EventsWriter(str(folder / "events"), f".after-{after_step}")
        self._write(after_step + 1, session_log={"status": "START"})

    def add(self, report: RunReport) -> None:
        """Write the numbers of a report; flush at evaluations and samples."""
        if isinstance(report, StepReport):
            if report.loss is not None:
                self._scalar("loss/train", report.loss, report.step)
            self._scalar("learning_rate", report.learning_rate, report.step)
            self._scalar("tokens_per_second", report.tokens_per_second, report.step)
            return
        if isinstance(report, EvalReport):
            self._scalar("loss/validation", report.loss, report.step)
            self._scalar("bits_per_byte/validation", report.bits_per_byte, report.step)
        elif isinstance(report, SampleReport):
            from tensorboardX.summary import text

            self._write(report.step, summary=text("sample", _as_code(report)))
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        from tensorboardX.summary import scalar

        self._write(step, summary=scalar(name, value))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, **content))


def _as_code(sample: SampleReport) -> str:
    """Format a sample as a Markdown code block, as TensorBoard renders text."""
    text = (sample.prompt + sample.text).decode(errors="replace")
    return "".join(f"    {line}\n" for line in text.splitlines())
