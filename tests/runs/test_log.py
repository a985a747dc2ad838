"""The training log: every report exactly once, even after kills and full disks."""

import json
import os
from itertools import islice
from pathlib import Path

import pytest

from support.runs import TRAINED, request, resume
from tgen import runs
from tgen.errors import ModelError
from tgen.planning import side_work
from tgen.reports.json_text import json_record
from tgen.reports.training import PhaseReport, PlanReport, RollbackReport, SampleReport, StepReport
from tgen.runs import log as run_log
from tgen.runs.log import RunLog
from tgen.storage import files


def step(number: int, loss: float = 1.0) -> StepReport:
    return StepReport(
        step=number,
        loss=loss,
        learning_rate=0.1,
        tokens_per_second=9.0,
        seconds=float(number),
        fraction_done=0.0,
        seconds_left=0.0,
    )


def numbers(out: Path) -> list[tuple[object, ...]]:
    """Return the numbers that training computed, in log order."""
    return [
        (r["kind"], r["step"], r.get("loss"), r.get("bits_per_byte"), r.get("text"))
        for r in run_log.read(out)
        if r["kind"] in TRAINED
    ]


def without_phases(reports, *, begun=False):
    """Yield reports of the log; if `begun`, the plan once the run is on disk."""
    plan = None
    for report in reports:
        if begun and isinstance(report, PlanReport):
            plan = report
        elif plan is not None and isinstance(report, PhaseReport) and report.saved:
            yield plan
            plan = None
        elif not isinstance(report, PhaseReport):
            yield report


def test_log_has_every_report(tmp_path):
    reports = list(runs.start(request(tmp_path)))
    records = run_log.read(tmp_path / "model")
    logged = [report for report in reports if not isinstance(report, PhaseReport)]
    assert records == [json.loads(json.dumps(json_record(report))) for report in logged]
    assert [r["step"] for r in records if r["kind"] == "StepReport"] == [*range(1, 15)]


def test_log_of_a_killed_and_resumed_run_equals_the_uninterrupted_log(tmp_path, monkeypatch):
    monkeypatch.setattr(side_work, "SAMPLE_TOKENS", 2)
    n_reports = len(list(without_phases(runs.start(request(tmp_path, "whole")))))
    whole = [n for n in numbers(tmp_path / "whole") if n[0] != "SampleReport"]
    # After the plan, steps, step 5, its evaluation, its sample, step 6, the last but one report.
    for killed_after in (1, 4, 6, 7, 8, 9, n_reports - 1):
        out = tmp_path / f"killed-{killed_after}"
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "__exit__", lambda *_: None)  # a killed process does not flush
            patch.setattr(run_log, "_BUFFERED_LINES", 2)  # also with a log ahead of its state
            reports = runs.start(request(tmp_path, out.name))
            for _ in islice(without_phases(reports, begun=True), killed_after):
                pass
            reports.close()
            if killed_after > 1:
                with (out / "training" / "log.jsonl").open("a") as file:
                    file.write('{"kind": "Step')
        list(resume(out, threads=1))
        assert [n for n in numbers(out) if n[0] != "SampleReport"] == whole, killed_after
        kinds = [r["kind"] for r in run_log.read(out)]
        assert kinds.count("PlanReport") == (2 if killed_after > 1 else 1)  # one per session
        assert kinds[-1] == "DoneReport"


def test_lines_are_buffered_until_100_or_the_end_of_the_run(tmp_path):
    path = tmp_path / "training" / "log.jsonl"
    path.parent.mkdir()

    def interrupted() -> None:
        with RunLog(tmp_path) as log:
            for number in range(1, 100):
                log.add(step(number))
            assert not path.exists()
            log.add(step(100))
            assert len(run_log.read(tmp_path)) == 100
            log.add(step(101))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(run_log.read(tmp_path)) == 101


@pytest.mark.parametrize("truncates", [True, False])
def test_failed_write_is_repeated_without_duplicates(tmp_path, monkeypatch, truncates):
    (tmp_path / "training").mkdir()
    log, write = RunLog(tmp_path), os.write
    log.add(step(1))
    log.flush()

    def full_disk(fd: int, content: bytes) -> int:
        if len(content) > 10:
            return write(fd, content[:10])
        raise OSError(28, "No space left on device")

    def broken_disk(*_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        if not truncates:
            patch.setattr(os, "ftruncate", broken_disk)
        for number in range(2, 102):  # enough for the buffer to be written
            log.add(step(number))
        with pytest.raises(OSError, match="No space" if truncates else "Input"):
            log.flush()
    if truncates:
        assert [record["step"] for record in run_log.read(tmp_path)] == [1]
    log.flush()
    assert [record["step"] for record in run_log.read(tmp_path)] == list(range(1, 102))


def test_trim_works_on_a_full_disk_and_is_repeated_after_a_failure(tmp_path, monkeypatch):
    (tmp_path / "training").mkdir()
    log = RunLog(tmp_path)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def written() -> list[int]:
        return [record["step"] for record in run_log.read(tmp_path)]

    for number in range(1, 6):
        log.add(step(number))
    log.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        log.trim(4)
        assert written() == [1, 2, 3, 4]
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(OSError, match="No space"):
            log.trim(2)
    log.add(step(3, 7.0))
    log.add(step(4, 8.0))
    log.flush()
    assert written() == [1, 2, 3, 4]
    assert run_log.read(tmp_path)[-1]["loss"] == 8.0


def test_trim_drops_a_rollback_after_the_saved_state(tmp_path):
    (tmp_path / "training").mkdir()
    back = RollbackReport(step=2, from_step=6, reason="", learning_rate_scale=1.0)
    with RunLog(tmp_path) as log:
        for report in (step(1), back, step(2), back):
            log.add(report)
    with RunLog(tmp_path) as log:
        log.trim(2, n_rollbacks=2)
        assert len(run_log.read(tmp_path)) == 4
        log.trim(2, n_rollbacks=1)
    assert [r["kind"] for r in run_log.read(tmp_path)] == [
        "StepReport",
        "RollbackReport",
        "StepReport",
    ]


def test_log_contains_all_bytes_of_a_sample(tmp_path):
    (tmp_path / "training").mkdir()
    with RunLog(tmp_path) as log:
        log.add(SampleReport(step=1, prompt="é\u2028".encode(), text=b"a\xff\n"))
    (record,) = run_log.read(tmp_path)
    assert record == {
        "kind": "SampleReport",
        "step": 1,
        "prompt": "é\u2028",
        "text": "a\ufffd\n",
        "bytes": "Yf8K",
    }


def test_torn_last_line_is_ignored_but_another_damaged_line_is_an_error(tmp_path):
    (tmp_path / "training").mkdir()
    with RunLog(tmp_path) as log:
        log.add(step(1))
        log.add(step(2))
    path = tmp_path / "training" / "log.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [r["step"] for r in run_log.read(tmp_path)] == [1]
    for damage in (b"{", b"[1]", b"[" * 100_000, b'{"step": 1}', b"\xff", b""):
        path.write_bytes(whole[:first] + damage + b"\n" + whole[first:])
        with pytest.raises(ModelError, match="damaged at line 2"):
            run_log.read(tmp_path)
    with RunLog(tmp_path) as log:
        log.trim(1)
    assert path.read_bytes() == whole[:first]


def test_missing_log_is_an_error_with_its_path(tmp_path):
    with pytest.raises(ModelError, match=r"has no training log"):
        run_log.read(tmp_path)
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        run_log.read(tmp_path / "nowhere")


def test_line_that_is_added_during_a_flush_is_written_once(tmp_path, monkeypatch):
    (tmp_path / "training").mkdir()
    append = files.append
    with RunLog(tmp_path) as log:

        def add_and_append(*arguments, **named):
            log.add(step(2))
            monkeypatch.undo()
            return append(*arguments, **named)

        monkeypatch.setattr(files, "append", add_and_append)
        log.add(step(1))
        log.flush()
        assert [record["step"] for record in run_log.read(tmp_path)] == [1]
    assert [record["step"] for record in run_log.read(tmp_path)] == [1, 2]
