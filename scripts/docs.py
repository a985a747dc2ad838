"""Run the commands in README.md and docs/, insert their output, and draw the terminal pictures.

A fenced block marked `console` holds commands (`$ ...`, continued after a backslash or a pipe) and
their output. Each command runs in `build/docs`, and its output replaces the old one. A comment just
above the block can shorten the output, prepare the folder, or leave the block alone:

    <!-- docs: first 12, last 3 -->     show only these lines, "..." for the rest
    <!-- docs: before rm -rf out -->    run this shell command first, without showing it
    <!-- docs: skip -->                 not reproducible here; leave it as it is

A picture is an SVG file of what a command draws on a terminal of a given size (see PICTURES).
"""

import argparse
import copy
import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "docs"
PICTURES_DIR = ROOT / "docs" / "pictures"
PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/lesson.md",
    "docs/tuning.md",
    "docs/train.md",
    "docs/generate.md",
    "docs/inspect.md",
    "docs/score.md",
    "docs/lab.md",
    "docs/bench.md",
    "docs/export.md",
    "docs/models.md",
    "docs/scaling.md",
)
THEME = TerminalTheme(
    (24, 26, 31),
    (220, 223, 228),
    [
        (40, 44, 52), (224, 108, 117), (152, 195, 121), (229, 192, 123),
        (97, 175, 239), (198, 120, 221), (86, 182, 194), (220, 223, 228),
    ],
    [
        (92, 99, 112), (240, 128, 137), (172, 215, 141), (245, 212, 143),
        (117, 195, 255), (214, 140, 237), (106, 202, 214), (255, 255, 255),
    ],
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One terminal picture: the commands, the size, and when to take it."""

    commands: tuple[str, ...]
    columns: int = 100
    rows: int = 40
    seconds: float | None = None  # take the picture then and stop the command; None: at its end
    before: str = ""  # shell command to run first, not shown


PICTURES = {
    "train": Picture(
        commands=("tgen train tinyshakespeare.txt --minutes 1 --out models/plays",),
        before="rm -rf models/plays",
        seconds=50,
    ),
    "generate": Picture(
        commands=(
            'tgen generate -m shakespeare --prompt "What is" -n 60 --seed 5',
            'tgen generate -m shakespeare --prompt "Shall we " --choices fight,flee,sleep --seed 3',
            "tgen generate -m shakespeare --prompt 'My lord, ' --seed 1"
            " --regex '[A-Z][a-z]+( [a-z]+){3,5}[.!?]'",
        ),
    ),
    "inspect": Picture(
        commands=('tgen inspect -m shakespeare --prompt "What is the king\'s name?"',),
    ),
    "lens": Picture(
        commands=(
            'tgen inspect -m shakespeare --prompt "What is the king" --view predict --view lens',
        ),
    ),
    "curves": Picture(
        commands=("tgen inspect -m models/plays --view training",),
        before="[ -d models/plays ] || "
        "tgen train tinyshakespeare.txt --minutes 1 --out models/plays -q",
    ),
    "bench": Picture(
        commands=("tgen bench -m shakespeare",),
    ),
    "kv_cache": Picture(
        commands=("tgen bench -m shakespeare --kv-cache",),
        rows=50,
    ),
    "export": Picture(
        commands=(
            "tgen export shakespeare --to gguf --type q8_0",
            'tgen generate -m shakespeare-q8_0.gguf --prompt "What is" -n 20 --seed 1',
        ),
        before="rm -f shakespeare-q8_0.gguf",
    ),
}


class Screen:
    """The part of a terminal that tgen uses: text, SGR styles, cursor motion, line erasure."""

    _TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n])|([^\x1b\r\n]+)")

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]  # characters with their SGR codes
        self.row = self.column = 0
        self.style = ""

    def feed(self, text: str) -> None:
        """Apply a piece of output that does not end within an escape sequence."""
        for match in self._TOKEN.finditer(text):
            parameters, command, control, plain = match.groups()
            if command == "m":
                self.style = "" if parameters in ("", "0") else f"{self.style}\x1b[{parameters}m"
            elif command is not None:
                self._move(command, int(parameters.lstrip("?") or "0"))
            elif control == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append([])
            elif control == "\r":
                self.column = 0
            elif plain:
                self._write(plain)

    def _move(self, command: str, count: int) -> None:
        if command == "A":
            self.row = max(0, self.row - max(1, count))
        elif command == "B":
            self.row = min(len(self.lines) - 1, self.row + max(1, count))
        elif command == "G":
            self.column = max(0, count - 1)
        elif command == "K":
            start, stop = {0: (self.column, None), 1: (0, self.column), 2: (0, None)}[count]
            line = self.lines[self.row]
            line[start:stop] = [(" ", "")] * len(line[start:stop])
        elif command == "J":
            del self.lines[self.row + 1 :]
            del self.lines[self.row][self.column :]

    def _write(self, text: str) -> None:
        line = self.lines[self.row]
        line.extend([(" ", "")] * (self.column + len(text) - len(line)))
        line[self.column : self.column + len(text)] = [(char, self.style) for char in text]
        self.column += len(text)

    def ansi_lines(self) -> list[str]:
        """Return the lines as text with SGR codes, without trailing spaces and empty lines."""
        lines = []
        for line in self.lines:
            while line and line[-1] == (" ", ""):
                line = line[:-1]
            drawn, before = "", ""
            for char, style in line:
                drawn += char if style == before else f"\x1b[0m{style}{char}"
                before = style
            lines.append(drawn + "\x1b[0m" * bool(before))
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def text_lines(self) -> list[str]:
        """Return the lines without styles, trailing spaces and empty lines at the end."""
        lines = ["".join(char for char, _ in line).rstrip() for line in self.lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def main() -> None:
    """Update the named pages or pictures, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="Markdown files; default: all pages and pictures")
    parser.add_argument("--corpus", type=Path, help="tinyshakespeare.txt, if build/docs lacks it")
    parser.add_argument("--pictures", nargs="*", choices=PICTURES, help="pictures to draw")
    options = parser.parse_args()
    prepare_folder(options.corpus)
    everything = not options.pages and options.pictures is None
    for name in options.pictures or (PICTURES if everything or options.pictures == [] else ()):
        report(f"docs/pictures/{name}.svg")
        draw_picture(name, PICTURES[name])
    if everything:
        report("docs/pictures/live.png")
        subprocess.run([sys.executable, ROOT / "scripts" / "page_pictures.py"], check=True)
    for page in options.pages or (PAGES if everything else ()):
        report(page)
        copy_shipped_model()
        update_page(ROOT / page)


def report(line: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(line + "\n")


def prepare_folder(corpus: Path | None) -> None:
    """Fill the working folder: the shipped model and two corpora."""
    copy_shipped_model()
    plays = WORK / "tinyshakespeare.txt"
    if corpus is not None:
        shutil.copyfile(corpus, plays)
    if not plays.exists():
        raise SystemExit("name a copy of tinyshakespeare.txt: scripts/docs --corpus FILE")
    from pydoc_data import topics

    (WORK / "python.txt").write_text("\n\n".join(topics.topics.values()))


def copy_shipped_model() -> None:
    """Leave the shipped model as the only one, so that commands without a model use it."""
    shutil.rmtree(WORK / "models", ignore_errors=True)
    shutil.copytree(ROOT / "models" / "shakespeare", WORK / "models" / "shakespeare")


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of the commands: this checkout's tgen, and no user settings."""
    kept = {
        name: os.environ[name] for name in ("HOME", "PYTHONPATH", "TMPDIR") if name in os.environ
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"PATH": path, "LC_ALL": "C.UTF-8"} | extra


def run_command(command: str) -> None:
    """Run a shell command in the working folder, without showing it."""
    subprocess.run(
        ["bash", "-c", command], cwd=WORK, env=environment(), stdin=subprocess.DEVNULL, check=True
    )


def update_page(path: Path) -> None:
    """Replace the output in the `console` blocks of a page."""
    block = re.compile(
        r"(?:<!-- docs: (?P<how>.*?) -->\n)?```console\n(?P<body>.*?)```\n", re.DOTALL
    )
    path.write_text(block.sub(update_block, path.read_text()))


def update_block(match: re.Match[str]) -> str:
    """Return a `console` block with new output."""
    how = match["how"] or ""
    if how == "skip":
        return match[0]
    if how.startswith("before "):
        run_command(how.removeprefix("before "))
    lines = []
    for command in commands_of(match["body"]):
        lines += command
        shown = re.sub(r"^[$>] ?", "", command[0])
        wait_until_idle(shown)
        screen = run_in_terminal("\n".join([shown, *command[1:]]), NO_COLOR="1")
        lines += shorten(screen.text_lines(), how)
    comment = f"<!-- docs: {how} -->\n" if how else ""
    return f"{comment}```console\n" + "\n".join(lines) + "\n```\n"


def commands_of(body: str) -> list[list[str]]:
    """Return the lines of each command of a block."""
    commands: list[list[str]] = []
    continued = False
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append([line])
        elif continued:
            commands[-1].append(line)
        else:
            continue
        continued = line.endswith(("\\", "|"))
    return commands


def shorten(lines: list[str], how: str) -> list[str]:
    """Leave out the middle of an output as `first N`, `last N` or both say."""
    first, last = (re.search(rf"\b{word} (\d+)", how) for word in ("first", "last"))
    n_first, n_last = (int(match[1]) if match else 0 for match in (first, last))
    if how.startswith("before ") or not n_first + n_last or len(lines) <= n_first + n_last:
        return lines
    return [*lines[:n_first], "...", *lines[len(lines) - n_last :]]


def draw_picture(name: str, picture: Picture) -> None:
    """Run a picture's commands in a pseudo-terminal and write the SVG file."""
    if picture.before:
        run_command(picture.before)
    lines: list[Text] = []
    for command in picture.commands:
        if lines:
            lines.append(Text())
        lines.append(Text.assemble(("$ ", "bold green"), (command, "bold")))
        wait_until_idle(command)
        screen = run_in_terminal(command, picture.columns, picture.rows, picture.seconds)
        lines += [Text.from_ansi(line) for line in screen.ansi_lines()]
    console = Console(record=True, width=picture.columns, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in lines:
        console.print(line, overflow="crop", no_wrap=False)
    svg = console.export_svg(title="tgen", theme=THEME, unique_id=f"tgen-{name}")
    svg = re.sub(r"\s*@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # no font from the network
    svg = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
    (PICTURES_DIR / f"{name}.svg").write_text(svg)


def run_in_terminal(
    command: str, columns: int = 100, rows: int = 40, seconds: float | None = None, **settings: str
) -> Screen:
    """Return the screen of a pseudo-terminal at the command's end, or after some seconds."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(WORK)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        settings |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.execvpe("bash", ["bash", "-c", command], environment(**settings))
    screen, taken, pending = Screen(), None, b""
    end = time.monotonic() + (seconds or 3600)
    while True:
        if taken is None and time.monotonic() > end:
            taken = copy.deepcopy(screen)
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the command has closed its end
            break
        if not read:
            break
        pending += read
        complete = complete_length(pending)
        screen.feed(pending[:complete].decode(errors="replace"))
        pending = pending[complete:]
    os.waitpid(pid, 0)
    os.close(terminal)
    if any(str(ROOT) in line for line in screen.text_lines()):
        raise SystemExit(f"the output of {command!r} has a path of this machine")
    return taken or screen


def wait_until_idle(command: str) -> None:
    """Wait for an idle machine before a command that measures speed, at most three minutes."""
    end = time.monotonic() + 180
    while re.match("tgen (bench|train)", command) and time.monotonic() < end:
        if os.getloadavg()[0] < 0.5:
            break
        time.sleep(5)


def complete_length(data: bytes) -> int:
    """Return the length of the data without an incomplete escape sequence or character."""
    escape = data.rfind(b"\x1b")
    if escape >= 0 and not re.match(rb"\x1b(\[[?0-9;]*[A-Za-z]|\].*\x07)", data[escape:]):
        return escape
    for length in range(len(data), max(-1, len(data) - 4), -1):
        try:
            data[:length].decode()
        except UnicodeDecodeError:
            continue
        return length
    return len(data)


if __name__ == "__main__":
    main()
