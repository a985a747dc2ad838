"""A run's log, `training/log.jsonl`: every report as a line of JSON, in the order they came.

Lines gather in memory and are written together. They are written before each state, so that a
killed process leaves no state ahead of its log; what the log has beyond a state is cut when a run
is resumed.
"""

import json
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tgen.errors import ModelError, TgenError
from tgen.reports import RollbackReport, RunReport, json_record
from tgen.runs.storage import state
from tgen.storage import files

_TOGETHER = 100  # lines at most that a killed process loses
_UNKNOWN = 1 << 62  # the step of a line that says none: after all others

_Report = TypeVar("_Report", bound=RunReport)


class RunLog:
    """The log of the run in `out`, whose lock is held; leaving the block writes what is left.

    With None nothing is written: another rank does.
    """

    def __init__(self, out: Path | None) -> None:
        self._path = None if out is None else _path(out)
        self._lines: list[str] = []
        there = self._path is not None and self._path.exists()
        self._length = self._path.stat().st_size if self._path and there else 0  # what is sound
        self._trim_to: int | None = None  # a step, as long as the file has what came after it
        self._ways_back: int | None = None  # that the state there knows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError, TgenError):  # what belongs to the last state has been written
            self.flush()

    def add(self, report: _Report) -> _Report:
        """Notes `report` and hands it back."""
        self._lines.append(json.dumps(json_record(report)) + "\n")
        if len(self._lines) % _TOGETHER == 0:
            with suppress(OSError, TgenError):  # a full disk stops no training
                self.flush()
        return report

    def flush(self) -> None:
        """Writes the lines that have gathered; raises OSError or TgenError where that fails, and
        keeps them."""
        if not self._path:
            self._lines.clear()
            return
        self._trim_file()
        if self._lines:
            content = "".join(self._lines).encode()
            self._length = files.append(self._path, content, after=self._length)
            self._lines.clear()

    def trim(self, step: int, *, ways_back: int | None = None) -> None:
        """Drops what was added of steps after `step`, which will be taken again, and of the ways
        back all but so many (None: any), for what its state does not know of it will do again.

        Raises as `flush`, before whose next success it is done all the same.
        """
        self._lines = [line for line in self._lines if _step(line) <= step]
        self._trim_to, self._ways_back = step, ways_back
        self._trim_file()

    def _trim_file(self) -> None:
        if self._trim_to is None or not self._path:
            return
        if self._path.exists():
            whole = files.read(self._path)
            lines = whole.decode(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and _step(line) <= self._trim_to]
            back = [i for i, line in enumerate(kept) if _is_way_back(line)]
            if self._ways_back is not None and len(back) > self._ways_back:
                del kept[back[self._ways_back] :]
            content = "".join(kept).encode()
            if whole.startswith(content):  # needs no room
                files.append(self._path, b"", after=len(content))
            else:
                files.publish(self._path, content)
            self._length = len(content)
        self._trim_to = None


def read(out: Path) -> list[dict[str, Any]]:
    """The log's records, {"kind": name of the report, **its fields}; a torn last line is left out.

    Raises ModelError if `out` has no log or another line of it is damaged.
    """
    path = _path(out)
    if not path.exists():
        message = f"{out} has no training log" if out.exists() else f"{out} does not exist"
        raise ModelError(message, "name a model that `tgen train` made with --model")
    lines = files.read(path).decode(errors="replace").split("\n")
    records = []
    for i, line in enumerate(lines[:-1]):  # after the last line break: nothing, or a torn line
        record = _parse(line)
        if record is None:
            raise ModelError(f"{path} is damaged at line {i + 1}", "delete that line")
        records.append(record)
    return records


def _path(out: Path) -> Path:
    return state.folder(out) / "log.jsonl"


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _is_way_back(line: str) -> bool:
    return (_parse(line) or {}).get("kind") == RollbackReport.__name__


def _step(line: str) -> int:
    record = _parse(line) or {}
    step = record.get("step", record.get("resumed_at_step"))
    return step if isinstance(step, int) else _UNKNOWN
