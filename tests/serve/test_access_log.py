"""The access log delays nobody, and counts what nobody has read."""

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tgen.serve import access_log
from tgen.serve.access_log import AccessLog, LogEntry


def entry(path: str = "/v1/completions", status: int = 200, **answer: Any) -> LogEntry:
    made = LogEntry({"method": "POST", "path": path})
    made.status = status
    if answer:
        made.answer, made.model, made.seed = SimpleNamespace(**answer), "m", 7  # type: ignore
    return made


def full_log() -> tuple[AccessLog, threading.Event, list[bytes]]:
    """Return a log with more lines than it has room for, an event that lets its reader read, and
    what the reader got."""
    reading = threading.Event()
    lines: list[bytes] = []

    def write(line: bytes) -> None:
        reading.wait()
        lines.append(line)

    log = AccessLog("json", write)
    for _ in range(1500):
        log.add(entry())
    return log, reading, lines


def test_lines_are_short_and_escaped() -> None:
    lines: list[bytes] = []
    log = AccessLog("json", lines.append)
    log.add(entry("/a b\n\x1b[2J\ud800" + "x" * 1000, status=404))
    log.add(entry(prompt_tokens=5, new_tokens=2, is_complete=False))
    log.close()
    first, second, last = map(json.loads, lines)
    assert first["path"].startswith("/a%20b%0A%1B%5B2J%3Fxxx")
    assert len(first["path"]) < 250
    assert (second["new_tokens"], second["seed"], second["complete"]) == (2, 7, False)
    assert (last["requests"], last["errors"], last["prompt_tokens"]) == (2, 1, 5)
    assert all(line.endswith(b"\n") and line.isascii() for line in lines)


def test_a_reader_that_does_not_read_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_CLOSE_SECONDS", 0)
    log, reading, lines = full_log()
    reading.set()
    log._thread.join(0)
    while not log._lines.empty():
        pass
    log.close()
    log._thread.join()
    last = json.loads(lines[-1])
    assert last["requests"] == 1500
    assert last["dropped_lines"] == 1500 + 1 - len(lines)
    assert 0 < len(lines) < 1100


def test_the_last_line_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_CLOSE_SECONDS", 60)
    log, reading, lines = full_log()
    closing = threading.Thread(target=log.close)
    closing.start()
    reading.set()
    closing.join()
    assert not log._thread.is_alive()
    assert json.loads(lines[-1])["requests"] == 1500


def test_a_reader_that_has_left_is_ignored() -> None:
    def write(_: bytes) -> None:
        raise BrokenPipeError

    log = AccessLog("text", write)
    log.add(entry())
    log._thread.join()
    log.add(entry())
    log.close()


def test_a_log_that_is_off_writes_nothing() -> None:
    lines: list[bytes] = []
    log = AccessLog("off", lines.append)
    log.add(entry())
    log.close()
    assert lines == []


@pytest.mark.parametrize("form", ["json", "text"])
def test_in_json_all_lines_of_stderr_are_objects(
    form: Literal["json", "text"], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[bytes] = []
    log = AccessLog(form, lines.append)
    with log.capture_stderr():
        for text in ("warning: a\nb", " 3", "\n"):  # as print writes them
            sys.stderr.write(text)
    log.close()
    plain = "warning: a\nb 3\n"
    assert capsys.readouterr().err == ("" if form == "json" else plain)
    if form == "json":
        assert json.loads(lines[0])["message"] == plain.rstrip()


def test_threads_do_not_mix_their_messages() -> None:
    lines: list[bytes] = []
    log = AccessLog("json", lines.append)
    with log.capture_stderr():
        sys.stderr.write("warning: a")
        other = threading.Thread(target=sys.stderr.write, args=("Traceback x\n",))
        other.start()
        other.join()
        sys.stderr.write("\n")
        sys.stderr.write("\n")
    log.close()
    messages = [json.loads(line).get("message") for line in lines]
    assert messages == ["Traceback x", "warning: a", None]
