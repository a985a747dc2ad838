"""Lines of --input: an endless one is an error, not all of the memory."""

import threading
from queue import Queue

import pytest

from tgen.cli.generate import input_rows
from tgen.errors import TgenError, UsageError


def test_line_beyond_the_limit_is_an_error_after_the_lines_before(tmp_path, monkeypatch):
    monkeypatch.setattr(input_rows, "_MAX_LINE", 1 << 20)
    path = tmp_path / "lines.txt"
    path.write_bytes(b"first\n" + b"x" * (1 << 20) + b"\n" + b"y" * (3 << 20))
    lines = input_rows.LineReader(str(path))
    assert lines.next(wait=True) == b"first"
    assert lines.next(wait=True) == b"x" * (1 << 20)
    with pytest.raises(UsageError, match="a line of the input is larger than 1 MiB"):
        lines.next(wait=True)
    assert lines.next(wait=True) is None


def test_long_lines_are_not_read_ahead(tmp_path, monkeypatch):
    settled = threading.Event()  # the reader waits, or is done

    class WatchedQueue(Queue):
        def put(self, item, *args, **how):
            super().put(item, *args, **how)
            if item is None:
                settled.set()

        def join(self):
            settled.set()
            super().join()

    monkeypatch.setattr(input_rows, "Queue", WatchedQueue)
    path, line = tmp_path / "lines.txt", b"x" * (1 << 20)
    path.write_bytes((line + b"\n") * 20)
    lines = input_rows.LineReader(str(path))
    settled.wait()
    assert lines._lines.qsize() == 1
    assert [lines.next(wait=True) for _ in range(21)] == [line] * 20 + [None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("lines.gz", b"\x1f\x8b\x08\0\0\0\0\0", "NUL bytes"),
        ("lines.txt", "To be\n".encode("utf-16"), "NUL bytes"),
        ("rows.json", b'\xef\xbb\xbf\n[\n{"prompt": "To be"}]', "a JSON list"),
    ],
)
def test_files_without_lines_are_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TgenError, match=message):
        input_rows.LineReader(str(tmp_path / name))
