"""Lines of --input: an endless one is an error, not all of the memory."""

import pytest

from tgen.cli.generate import input_lines
from tgen.errors import UsageError


def test_line_beyond_the_limit_is_an_error_after_the_lines_before(tmp_path, monkeypatch):
    monkeypatch.setattr(input_lines, "_MAX_LINE", 1 << 20)
    path = tmp_path / "lines.txt"
    path.write_bytes(b"first\n" + b"x" * (1 << 20) + b"\n" + b"y" * (3 << 20))
    lines = input_lines.LineReader(str(path))
    assert lines.next(wait=True) == b"first"
    assert lines.next(wait=True) == b"x" * (1 << 20)
    with pytest.raises(UsageError, match="a line of the input has more than 1 MiB"):
        lines.next(wait=True)
    assert lines.next(wait=True) is None
