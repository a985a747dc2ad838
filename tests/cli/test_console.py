"""Text from files and prompts reaches the terminal without control characters, in any encoding."""

import io
import json
import os
import subprocess
import sys
import unicodedata
from contextlib import contextmanager
from importlib import import_module

import pytest
from rich.color import ColorSystem
from rich.console import Console
from rich.table import Table
from rich.text import Text

from support.command import clean_environment
from tgen.cli import console, rich_console, streams
from tgen.drawing.terminal_text import printable

# Format characters that text in some language needs, and that cannot reorder other text.
_NEEDED = (
    "\u00ad\u061c\u06dd\u070f\u08e2\u200b\u200c\u200d\u200e\u200f"
    "\u0600\u0601\u0602\u0603\u0604\u0605\u0890\u0891\U000110bd\U000110cd"
)
HOSTILE = "a\x1b]52;c;cm0gLXJm\x1b\\b\x1b[2J\r\x9b31m\x07\u202ec\u2066[red][link=file:///x]\x7f"


def test_every_code_point_is_escaped_or_kept_by_its_category():
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        category = unicodedata.category(character)
        harmful = category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\n\t"
        escaped = printable(f"a{character}b") != f"a{character}b"
        assert escaped == (harmful and character not in _NEEDED), hex(number)


def test_escapes_are_those_of_json():
    numbers = [n for n in range(sys.maxunicode + 1) if not 0xD800 <= n < 0xE000]
    for start in range(0, len(numbers), 256):
        characters = "".join(map(chr, numbers[start : start + 256]))
        text = json.dumps(characters, ensure_ascii=False)
        assert json.loads(printable(text)) == characters, hex(numbers[start])


@pytest.mark.parametrize(
    "text", ["می\u200cخواهم", "क्\u200dष", "👩\u200d👩\u200d👧", "שלום \u200fabc\u200e", "日本 é"]
)
def test_text_of_any_language_stays_readable(text):
    assert printable(text) == text
    assert printable(f"{text}\u202e") == f"{text}\\u202e"


def test_everything_drawn_is_escaped_and_markup_is_text(capsys):
    table = Table(f"[red]{HOSTILE}", title=f"[red]{HOSTILE}")
    table.add_row(f"[link=x]{HOSTILE}")
    for stream in (rich_console.out, rich_console.err):
        stream.print(HOSTILE, Text(HOSTILE), soft_wrap=True)
        stream.print(table)
    for text in capsys.readouterr():
        assert all(c.isprintable() or c == "\n" for c in text)
        assert text.count("[red][link=file:///x]") >= 2
        assert text.count("[red]a\\u001b") == 2
        assert "[link=x]a\\u001b" in text


def test_messages_are_single_lines(capsys):
    console.print_status(f"{HOSTILE}\nerror: forged\x85error: forged")
    console.print_error(f"{HOSTILE}\nerror: forged", HOSTILE)
    err = capsys.readouterr().err
    assert all(c.isprintable() or c == "\n" for c in err)
    assert err.count("\n") == 3
    assert "\nerror: forged" not in err


def test_quiet_leaves_errors_alone(capsys, monkeypatch):
    monkeypatch.setattr(console, "quiet", True)
    monkeypatch.setattr(console, "draws_progress", lambda: True)
    console.print_status("status")
    with console.progress("reading") as update:
        update(0.5)
    console.print_error("wrong", "mend it")
    assert capsys.readouterr().err == "error: wrong\nhint: mend it\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp437"])
def test_a_message_is_the_same_with_and_without_rich(encoding, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # a longer line needs Rich
    shown = []
    for loaded in (True, False):
        if loaded:
            import_module("tgen.cli.rich_console")
        else:
            monkeypatch.delitem(sys.modules, "tgen.cli.rich_console")
        data = _terminal(monkeypatch, "stderr", encoding)
        streams.adapt_streams()
        console.print_status(f"{DRAWING}\ta\tbc [red] 日本 {HOSTILE}" + " long" * 40)
        console.ask("Remove it?")
        shown.append(data.getvalue())
    assert "tgen.cli.rich_console" not in sys.modules
    assert shown[0] == shown[1]


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("word " * 7 + "end", ["word " * 5 + "word", "word end"]),
        ("日本語 " * 3 + "end", ["日本語 " * 3 + "end"]),
        ("日本語 " * 4 + "end", ["日本語 " * 3 + "日本語", "end"]),
    ],
)
def test_a_long_message_is_broken_at_the_width_of_the_terminal_of_stderr(text, lines):
    import pty
    import termios

    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 30))
    environment = clean_environment(TERM="xterm")
    environment.pop("COLUMNS", None)
    subprocess.run(
        [sys.executable, "-c", f"from tgen.cli import console; console.print_status({text!r})"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=environment,
        check=True,
    )
    shown = os.read(terminal, 1000).decode()
    os.close(stderr)
    os.close(terminal)
    assert [line.rstrip() for line in shown.splitlines()] == lines


def test_links_in_styles_are_dropped(capsys, monkeypatch):
    monkeypatch.setattr(rich_console.err, "_color_system", ColorSystem.EIGHT_BIT)
    rich_console.err.print(Text("a", style="red link file:///x"))
    assert capsys.readouterr().err == "\x1b[31ma\x1b[0m\n"


def test_libraries_and_tracebacks_write_no_control_characters(tmp_path):
    code = f"""
import sys, warnings, logging
from tgen.cli import app
def fail(*_):
    warnings.warn({HOSTILE!r})
    logging.getLogger("library").warning({HOSTILE!r})
    print({HOSTILE!r}, file=sys.stderr)
    raise AssertionError({HOSTILE!r})
import tgen.cli.generate.command as command
command._generate = fail
sys.argv = ["tgen", *sys.argv[1:]]
app.main()
"""
    for flags in (["--debug"], []):
        ended = subprocess.run(
            [sys.executable, "-c", code, *flags, "generate"],
            capture_output=True,
            env=clean_environment(TMPDIR=str(tmp_path)),
            check=False,
        )
        assert ended.returncode == 70
        text = ended.stderr.decode()
        assert text.count("[link=file:///x]") >= 4
        assert ("Traceback" in text) == bool(flags)
        assert all(c.isprintable() or c in "\n\t" for c in text)


def _terminal(monkeypatch, name: str, encoding: str) -> io.BytesIO:
    """Replace a stream by a terminal of another encoding; return its bytes."""

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    data = io.BytesIO()
    monkeypatch.setattr(sys, name, Terminal(data, encoding=encoding, write_through=True))
    return data


DRAWING = "▀▄█░▁▂▃▄▅▆▇█ ⠁⠒⡇⣿ ├─└│┤ ○●↑→·…‘’⏎⇥␍ ‹x› Δ–±"


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii", "latin-1", "utf-8"])
def test_drawings_are_readable_in_every_encoding(encoding, monkeypatch):
    data = _terminal(monkeypatch, "stdout", encoding)
    errors = _terminal(monkeypatch, "stderr", encoding)
    streams.adapt_streams()
    console.show(DRAWING + " 日本 \x1b")
    console.write("日本 é\x1b".encode())
    console.print_status(DRAWING + " 日本 \x1b")
    for shown in (data.getvalue(), errors.getvalue()):
        text = shown.decode(encoding)
        assert "\\u001b" in text
        line = text.splitlines()[0]
        if encoding == "utf-8":
            assert line == DRAWING + " 日本 \\u001b"
        else:
            drawing, _, rest = line.rpartition(" \\u65e5")
            assert "\\" not in drawing
            assert rest == "\\u672c \\u001b"
            assert len(drawing) == len(DRAWING)
    assert "日本 é".encode(encoding, "backslashreplace") in data.getvalue()


def test_a_pipe_gets_utf_8_whatever_the_locale(monkeypatch):
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding="cp1252", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    streams.adapt_streams()
    console.show("é▀")
    console.write("é▀\x1b".encode())
    assert data.getvalue().replace(b"\r", b"") == "é▀\né▀\x1b".encode()


def _stderr_of_progress(monkeypatch, **environment: str) -> str:
    data = _terminal(monkeypatch, "stderr", "utf-8")
    monkeypatch.setattr(rich_console.err, "_environ", {"TERM": "xterm"} | environment)
    monkeypatch.setattr(rich_console.err, "is_interactive", True)
    with console.progress("measuring [red]\x1b") as update:
        update(0.5)
        sys.stderr.write("library \x1b]52;c;cm0=\x1b\\\x1b[2J\x9b31m[red]\n")
    return data.getvalue().decode()


def test_what_libraries_write_during_a_progress_bar_is_escaped(monkeypatch):
    streams.adapt_streams()
    err = _stderr_of_progress(monkeypatch)
    assert "\\u009b31m[red]" in err
    assert "measuring [red]" in err
    assert not [code for code in ("\x1b]52", "\x9b", "\x1b[2J") if code in err]


def test_a_dumb_terminal_or_forced_color_gets_no_progress_bar(capsys, monkeypatch):
    assert "measuring" not in _stderr_of_progress(monkeypatch, TERM="dumb")
    monkeypatch.undo()
    monkeypatch.setattr(rich_console.err, "_environ", {"TERM": "xterm", "FORCE_COLOR": "1"})
    with console.progress("measuring") as update:
        update(0.5)
    assert capsys.readouterr().err == ""


def test_stderr_is_not_touched_when_python_closes_it_at_its_end(monkeypatch):
    class Gone:
        def flush(self):
            raise TypeError("'NoneType' object is not callable")

    stream = streams.Stderr()
    monkeypatch.setattr(sys, "stderr", Gone())
    stream.close()


def test_redirected_output_has_no_trailing_spaces(capsys):
    table = Table.grid(padding=(0, 2))
    table.add_row("name", "long value")
    table.add_row("longer name", "v")
    console.show(table)
    rich_console.err.print(table)
    shown = capsys.readouterr()
    assert shown.out == "name         long value\nlonger name  v\n"
    assert shown.err == shown.out


def test_terminal_breaks_lines_between_words_and_commands_nowhere(monkeypatch):
    output = io.StringIO()
    terminal = Console(file=output, width=30, force_terminal=True, color_system=None)
    monkeypatch.setattr(rich_console, "err", terminal)
    monkeypatch.setattr(streams.stderr, "isatty", lambda: True, raising=False)
    text = "resume with: tgen train --resume --out a-long-name"
    console.print_status(text)
    assert output.getvalue() == f"{text[:24]}\n{text[24:]}\n"
    output.truncate(0)
    output.seek(0)
    console.print_status(text, is_command=True)
    assert output.getvalue() == text + "\n"


def test_late_progress_begins_with_the_first_update_after_a_moment(monkeypatch):
    shown = []

    @contextmanager
    def progress(label):
        shown.append(label)
        yield shown.append
        shown.append("end")

    monkeypatch.setattr(console, "progress", progress)
    with console.late_progress("reading") as update:
        update(0.1)
        monkeypatch.setattr(console, "_MOMENT_SECONDS", 0.0)
        update(0.5)
        update(0.7)
    assert shown == ["reading", 0.5, 0.7, "end"]


def test_no_columns_mean_that_the_width_is_not_known():
    code = "from tgen.cli.rich_console import out; print(out.width)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=clean_environment(COLUMNS="0"),
        check=True,
    )
    assert result.stdout == b"80\n"
