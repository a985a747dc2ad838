"""The commands of `tgen generate --interactive`: lines that start with a slash."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.options import check_output_file
from tgen.config import raw
from tgen.errors import UsageError, suggest
from tgen.reports.number_format import count
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.cli.generate.chat import Session

COMMANDS = {
    "/help": "list the commands",
    "/clear": "start a new text or conversation",
    "/undo": "remove the last turn",
    "/retry": "generate the last turn again with the next seed",
    "/save FILE": "write the text, or the chat as one JSON object, to a new file",
    "/seed [N]": "set the seed of the next turn, or show it",
    "/set [NAME [VALUE]]": "set a sampling option, or show the changed ones; default resets it",
    "/why": "show the tokens of the last answer with their alternatives",
    "//": "a line that starts with one slash",
}
_NAMES = [usage.split()[0] for usage in COMMANDS if usage != "//"]
_WITH_VALUE = ("/save", "/seed", "/set")
_MAX_SHOWN = 60  # characters of a value


def run_command(session: "Session", line: bytes) -> None:
    """Run the command of a line; raise UsageError for an unknown or impossible one."""
    name, _, value = os.fsdecode(line).partition(" ")
    value = value.strip()
    if name not in _NAMES:
        similar = suggest(name, _NAMES)
        hint = similar or "/help lists the commands; // at the start of a line writes a slash"
        raise UsageError(f"{name[:_MAX_SHOWN]}: unknown command", hint)
    if value and name not in _WITH_VALUE:
        raise UsageError(f"{name} takes no value (got {value[:_MAX_SHOWN]!r})", f"type {name}")
    match name:
        case "/help":
            _show_help()
        case "/clear":
            session.clear()
        case "/undo":
            session.undo()
            console.print_line(f"removed the last turn; {count(len(session.turns), 'turn')} left")
        case "/retry":
            session.retry()
        case "/save":
            _save(session, value)
        case "/seed" if not value:
            console.print_line(f"seed {session.settings.seed} is next")
        case "/seed":
            session.settings.set("seed", value, session.check)
        case "/set":
            _set(session, value)
        case _:
            _show_why(session)


def _show_help() -> None:
    from rich.text import Text

    from tgen.drawing.tables import table

    rows = table("command", "")
    for usage, text in COMMANDS.items():
        rows.add_row(Text(usage, no_wrap=True), text)
    console.show(rows)


def _set(session: "Session", text: str) -> None:
    """Set an option, or show one or all."""
    name, _, value = text.partition(" ")
    settings = session.settings
    if value:
        settings.set(name, value, session.check)
    elif name:
        option, one = settings.find(name)
        console.print_line(f"{option} {_shown(one)}")
    else:
        changed = settings.changed()
        for option, one in changed.items():
            console.print_line(f"{option} {_shown(one)}")
        if not changed:
            console.print_line("all options have their defaults")


def _shown(value: Any) -> str:
    """Return the value of an option on one line."""
    if isinstance(value, (str, bytes)):
        text = raw(value).decode(errors="replace")
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text):,})"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], float):  # of a bias
        return f"{_shown(value[0])}={value[1]}"
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _save(session: "Session", name: str) -> None:
    if not name:
        raise UsageError("/save: no file", "name a new file: /save FILE")
    path = Path(name)
    if path.exists() or path.is_symlink():
        raise UsageError(f"/save {name}: the file exists", "name a new file")
    check_output_file("/save", path)
    if (messages := session.messages) is None:
        content = session.text
    else:
        texts = (one["content"].encode(errors="surrogateescape") for one in messages)
        chat = [
            {"role": one["role"], "content": text.decode(errors="replace")}
            for one, text in zip(messages, texts, strict=True)
        ]
        content = json.dumps({"messages": chat}, ensure_ascii=False).encode() + b"\n"
    files.write_output(path, content)
    console.print_line(f"saved {name} ({count(len(content), 'byte')})")


def _show_why(session: "Session") -> None:
    """Show the tokens of the last answer, and the most likely ones at their positions."""
    from rich.text import Text

    from tgen.drawing.tables import table
    from tgen.drawing.terminal_text import label

    if not session.turns or not session.turns[-1].tokens:
        raise UsageError("/why: no answer to show", "type a line first")
    bytes_of = session.model.vocabulary.bytes_of
    rows = table("token", ">probability", ">rank", "alternatives")
    for token in session.turns[-1].tokens:
        others = [
            f"{label(bytes_of(i), width=14)} {math.exp(logprob):.0%}"
            for i, logprob in token.top_logprobs
            if i != token.id
        ]
        shown = Text(label(bytes_of(token.id), width=20))
        probability = f"{math.exp(token.logprob):.1%}"
        rows.add_row(shown, probability, f"{token.rank:,}", Text("  ".join(others)))
    note = "probability under the model, before the samplers; rank 0: the most likely token"
    console.show(rows, Text(note, style="dim"))
