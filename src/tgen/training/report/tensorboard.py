"""A run's numbers as TensorBoard's events, for those who want its curves in a browser.

Needs the package tensorboardX, which writes the format without TensorBoard or TensorFlow.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tgen.errors import UsageError
from tgen.reports import EvalReport, EventsReport, RunReport, SampleReport, StepReport


def require() -> None:
    """Raises UsageError if the package is missing; to be asked before anything is trained."""
    if find_spec("tensorboardX") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboardX", "pip install 'tgen-lm[tensorboard]'"
        )


def recorded(reports: Iterator[RunReport], folder: Path, *, after_step: int) -> Iterator[RunReport]:
    """Hands on every report, after its numbers are events in `folder`.

    What an earlier sitting wrote there of steps after `after_step` is no longer shown. Where the
    disk refuses events an EventsReport says so, and the reports go on without.
    """
    require()
    events: _Events | None = None
    step, refused = after_step, False
    try:
        for report in reports:
            reason = ""
            try:
                if not refused:
                    events = events or _Events(folder, after_step)
                    events.add(report)
            except OSError as error:
                # No second try: what comes behind half an event cannot be read.
                refused, reason = True, error.strerror or str(error)
            yield report
            step = getattr(report, "step", step)
            if reason:
                yield EventsReport(step=step, failed=reason)
    finally:
        if events is not None:
            with suppress(OSError):
                events.close()


class _Events:
    """A file of events, written by whoever adds them: the package's own thread would die of a full
    disk, and whoever waits for it would wait for ever."""

    def __init__(self, folder: Path, after_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.record_writer import directory_check

        directory_check(str(folder))
        # A file's name has the second in it: the step keeps a quick resumption from overwriting
        # one.
        self._file = EventsWriter(str(folder / "events"), f".after-{after_step}")
        self._write(after_step + 1, session_log={"status": "START"})

    def add(self, report: RunReport) -> None:
        """The numbers of a report, and a file that has all so far where a state has been saved."""
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

            self._write(report.step, summary=text("sample", _verbatim(report)))
        self._file.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        from tensorboardX.summary import scalar

        self._write(step, summary=scalar(name, value))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, **content))


def _verbatim(sample: SampleReport) -> str:
    """The sample as a block of code in Markdown, which TensorBoard draws texts in."""
    text = (sample.prompt + sample.text).decode(errors="replace")
    return "".join(f"    {line}\n" for line in text.splitlines())
