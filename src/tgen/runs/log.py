"""The training log, `training/log.jsonl`: every report of a run as one JSON object per line.

Lines are buffered in memory. They are written before each training state, so a killed process
leaves no state that is ahead of its log; lines beyond the state are cut off on resume.
"""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from tgen.errors import ModelError, TgenError
from tgen.reports.json_text import json_record
from tgen.reports.training import DoneReport, LoggedReport, RollbackReport
from tgen.runs import saved_state
from tgen.storage import files

_BUFFERED_LINES = 100  # lost at most when the process is killed
_LAST = 1 << 62  # step of a line that has none: after all others

_Report = TypeVar("_Report", bound=LoggedReport)


class RunLog:
    """The log of the run in `out`, whose lock is held; `__exit__` writes the buffered lines.

    If `out` is None, nothing is written, since another rank writes.
    """

    def __init__(self, out: Path | None) -> None:
        self._path = None if out is None else _path(out)
        self._lines: list[str] = []
        self._flushing = threading.Lock()  # a save in the background flushes, too
        exists = self._path is not None and self._path.exists()
        self._length = self._path.stat().st_size if self._path and exists else 0  # valid bytes
        self._trim_to: int | None = None  # step to trim the file to at the next write
        self._n_rollbacks: int | None = None  # number to keep when the file is trimmed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, TgenError):  # the lines of the last saved state are written already
            self.flush()

    def add(self, report: _Report) -> _Report:
        """Log `report` and return it."""
        self._lines.append(json.dumps(json_record(report)) + "\n")
        if len(self._lines) % _BUFFERED_LINES == 0:
            with suppress(OSError, TgenError):  # a full disk does not stop training
                self.flush()
        return report

    def flush(self) -> None:
        """Write the buffered lines; if that raises OSError or TgenError, they stay buffered."""
        with self._flushing:
            lines = self._lines.copy()
            if self._path:
                self._trim_file()
            if self._path and lines:
                content = "".join(lines).encode()
                self._length = files.append(self._path, content, at=self._length)
            del self._lines[: len(lines)]

    def trim(self, step: int, *, n_rollbacks: int | None = None) -> None:
        """Drop the reports that the run will repeat.

        Drop reports after `step` and after the first `n_rollbacks` rollbacks (None: keep all
        rollbacks). Errors as `flush`; the next `flush` then trims the file.
        """
        self._lines = [line for line in self._lines if _step(line) <= step]
        self._trim_to, self._n_rollbacks = step, n_rollbacks
        self._trim_file()

    def _trim_file(self) -> None:
        if self._trim_to is None or not self._path:
            return
        if self._path.exists():
            old = files.read(self._path)
            lines = old.decode(errors="replace").splitlines(keepends=True)
            lines = [line for line in lines if line.endswith("\n") and _step(line) <= self._trim_to]
            kinds = [(_parse(line) or {}).get("kind") for line in lines]
            rollbacks = [i for i, kind in enumerate(kinds) if kind == RollbackReport.__name__]
            if self._n_rollbacks is not None and len(rollbacks) > self._n_rollbacks:
                del lines[rollbacks[self._n_rollbacks] :]
            content = "".join(lines).encode()
            if old.startswith(content):  # truncating works on a full disk too
                files.append(self._path, b"", at=len(content))
            else:
                files.publish(self._path, content)
            self._length = len(content)
        self._trim_to = None


def read(out: Path) -> list[dict[str, Any]]:
    """Return the log's records, {"kind": class name of the report, **fields}.

    A torn last line is ignored. Raise ModelError if `out` has no log or another line is damaged.
    """
    path = _path(out)
    if not path.exists():
        message = f"{out} has no training log" if out.exists() else f"{out} does not exist"
        raise ModelError(message, "pass a model trained with `tgen train` as --model")
    lines = files.read(path).decode(errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty or torn
        record = _parse(line)
        if record is None:
            raise ModelError(f"{path} is damaged at line {number}", "delete that line")
        records.append(record)
    return records


def last_done(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last DoneReport of a log; an empty one without any."""
    return next((one for one in reversed(records) if one["kind"] == DoneReport.__name__), {})


def _path(out: Path) -> Path:
    return saved_state.folder(out) / "log.jsonl"


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _step(line: str) -> int:
    record = _parse(line) or {}
    step = record.get("step", record.get("resumed_at_step"))
    return step if isinstance(step, int) else _LAST
