"""TensorBoard events equal the reports, across stops, kills and resumes."""

import errno
import io
import struct
from pathlib import Path
from typing import Any

import pytest

from support.runs import request, resume, start_run
from tgen import runs
from tgen.errors import UsageError
from tgen.planning import side_work
from tgen.reports.training import DoneReport, EvalReport, EventsReport, SampleReport, StepReport
from tgen.runs import tensorboard


def shown(out: Path) -> list[tuple[str, int, Any]]:
    """Return the events that TensorBoard shows: those that no later session repeats."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    events: list[tuple[str, int, Any]] = []
    files = (out / "training" / "tensorboard").iterdir()
    for path in sorted(files, key=lambda path: int(path.name.rsplit("-")[-1])):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])  # length, its checksum, event, its checksum
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                events = [entry for entry in events if entry[1] < event.step]
            for value in event.summary.value:
                text = b"".join(value.tensor.string_val).decode()
                events.append((value.tag, event.step, text or value.simple_value))
    return events


def numbers(out: Path) -> list[tuple[str, int, Any]]:
    """Return the events that are the same in every repetition of the run."""
    return [entry for entry in shown(out) if entry[0] != "tokens_per_second"]


def test_events_equal_the_reports(tmp_path):
    pytest.importorskip("tensorboardX")
    reports = list(runs.start(request(tmp_path, tensorboard=True)))
    expected: list[tuple[str, int, Any]] = []
    for report in reports:
        if isinstance(report, StepReport):
            expected += [
                ("loss/train", report.step, report.loss),
                ("learning_rate", report.step, report.learning_rate),
                ("tokens_per_second", report.step, report.tokens_per_second),
            ]
        elif isinstance(report, EvalReport):
            expected += [
                ("loss/validation", report.step, report.loss),
                ("bits_per_byte/validation", report.step, report.bits_per_byte),
            ]
    entries = shown(tmp_path / "model")
    scalars = [entry for entry in entries if entry[0] != "sample/text_summary"]
    assert [entry[:2] for entry in scalars] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in scalars] == pytest.approx([e[2] for e in expected], rel=1e-6)
    texts = [entry[1:] for entry in entries if entry[0] == "sample/text_summary"]
    closing = [report for report in reports if isinstance(report, SampleReport)]
    assert [step for step, _ in texts] == [sample.step for sample in closing]
    for (_, text), sample in zip(texts, closing, strict=True):
        lines = (sample.prompt + sample.text).decode(errors="replace").splitlines()
        assert text == "".join(f"    {line}\n" for line in lines)


def test_events_after_stops_and_kills_equal_the_uninterrupted_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr(side_work, "SAMPLE_TOKENS", 2)
    list(runs.start(request(tmp_path, "whole", tensorboard=True)))
    stops = iter([False] * 2 + [True])
    parts = tmp_path / "parts"
    list(runs.start(request(tmp_path, "parts", tensorboard=True), stopped=lambda: next(stops)))
    reports = resume(parts, threads=1)
    for report in reports:
        if isinstance(report, StepReport) and report.step == 8:
            reports.close()  # after the state of step 5: steps 6 to 8 are repeated
    assert ("loss/train", 8) in [entry[:2] for entry in shown(parts)]
    list(resume(parts, threads=1))
    assert len(list((parts / "training" / "tensorboard").iterdir())) == 3
    assert numbers(parts) == numbers(tmp_path / "whole")


def test_new_run_shows_nothing_of_the_old_one(tmp_path):
    pytest.importorskip("tensorboardX")
    anew = request(tmp_path, tensorboard=True, overwrite=True)
    list(runs.start(anew))
    start_run(anew)
    assert not (tmp_path / "model" / "training" / "tensorboard").exists()


def test_missing_package_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None if name else name)
    with pytest.raises(UsageError, match="tensorboardX") as caught:
        list(runs.start(request(tmp_path, tensorboard=True)))
    assert "pip install" in caught.value.hint
    assert not (tmp_path / "model").exists()
    start_run(request(tmp_path))  # without --tensorboard the package is not needed


class FullDisk(io.RawIOBase):
    """A file that refuses writes beyond some bytes, possibly after half an event."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self.left = n_bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(data) > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= len(data)
        return len(data)


@pytest.mark.parametrize("n_bytes", [0, 100, 700])
def test_full_disk_stops_the_events_but_not_the_run(tmp_path, monkeypatch, n_bytes):
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    list(runs.start(request(tmp_path, "without")))
    monkeypatch.setattr(record_writer, "open_file", lambda _: FullDisk(n_bytes))
    reports = list(runs.start(request(tmp_path, "full", tensorboard=True)))
    assert isinstance(reports[-1], DoneReport)
    assert reports[-1].finished
    failures = [report for report in reports if isinstance(report, EventsReport)]
    assert [report.failed for report in failures] == ["No space left on device"]
    weights = [tmp_path / name / "model.safetensors" for name in ("without", "full")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
