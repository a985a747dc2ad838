"""TensorBoard events of a run.

Needs the package tensorboardX, which writes the format without TensorBoard or TensorFlow.
"""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tgen.errors import UsageError
from tgen.reports.training import EvalReport, RunReport, SampleReport, StepReport
from tgen.runs.tracking import scalars


def require() -> None:
    """Raise UsageError if tensorboardX is missing; call it before training."""
    if find_spec("tensorboardX") is None:
        raise UsageError(
            "--tensorboard: the package tensorboardX is missing",
            "pip install 'tgen-lm[tensorboard]'",
        )


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
