"""Rows of `tgen generate --input`, read as soon as they arrive."""

import base64
import errno
import json
import math
import os
import threading
from codecs import BOM_UTF8
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tgen.cli.generate.options import MAX_SAMPLES, GenerateOptions
from tgen.config import SamplingConfig
from tgen.config.engine import EngineOptions
from tgen.config.option import require
from tgen.errors import TgenError, UsageError, suggest
from tgen.storage import files

_LONG, _LINES_AHEAD = 1 << 16, 4096  # bytes of a long line; lines
_MAX_LINE, _START = 64 << 20, 4096  # bytes
_EXAMPLE = 'write {"prompt": "..."} on a line'
_MAX_DEPTH = 200  # nested lists and objects of a row
_SHORT = {  # JSON fields may have a flag's short name
    flag[1:]: one.name
    for one in fields(SamplingConfig)
    for flag in one.metadata["flags"]
    if len(flag) == 2
}
# In these fields, null removes the value of the command line; in others, it counts as missing.
_OPTIONAL = {one.name for one in fields(SamplingConfig) if one.default is None}
_ROW_FIELDS = {"prompt", "prompt_bytes", "messages", "samples", "echo", "id"}
_MESSAGES = 'a list such as [{"role": "user", "content": "..."}]'
_GLOBAL_ONLY = {
    flag.lstrip("-").replace("-", "_")
    for one in (*fields(GenerateOptions), *fields(EngineOptions))
    for flag in one.metadata.get("flags", ())
} - _ROW_FIELDS


class LineReader:
    """A reader of lines in a background thread; the path `-` is stdin."""

    def __init__(self, path: str) -> None:
        self._lines: Queue[bytes | OSError | UsageError | None] = Queue(_LINES_AHEAD)
        self._fd, self._size = 0, 0
        if path != "-":
            try:
                with files.open_stream(Path(path)) as file:
                    if file.seekable():
                        _check_start(path, os.read(file.fileno(), _START))
                        os.lseek(file.fileno(), 0, os.SEEK_SET)
                    self._fd = os.dup(file.fileno())
                    self._size = os.fstat(self._fd).st_size
            except TgenError as error:
                raise TgenError(f"--input: {error.message}", error.hint) from None
        self._finished, self._n_read = False, 0
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def fraction(self) -> float | None:
        """Fraction of the file that was read; None for a pipe."""
        return min(1.0, self._n_read / self._size) if self._size else None

    def next(self, *, wait: bool) -> bytes | None:
        """Return the next line without its line break; None if none has arrived, or at the end.

        Raises OSError if the file cannot be read, UsageError for a line that is too long.
        """
        if self._finished:
            return None
        try:
            line = self._lines.get(wait)
        except Empty:
            return None
        if not isinstance(line, bytes):
            self._finished = True
            if line is not None:
                raise line
            return None
        self._lines.task_done()
        self._n_read += len(line) + 1
        return line

    def _read(self) -> None:
        end: OSError | UsageError | None = None
        try:  # not sys.stdin, whose lock would be held at process exit
            file = os.fdopen(self._fd, "rb", closefd=False)
            while line := file.readline(_MAX_LINE + 1):
                if line.endswith(b"\n"):
                    line = line[:-1].removesuffix(b"\r")
                elif len(line) > _MAX_LINE:
                    raise UsageError(
                        f"a line of the input is larger than {_MAX_LINE >> 20} MiB",
                        "pass one prompt per line",
                    )
                self._lines.put(line)
                if len(line) > _LONG:  # of long lines, only one at a time takes memory
                    self._lines.join()
        except UsageError as error:
            end = error
        except OSError as error:
            if self._fd or error.errno != errno.EBADF:  # a closed stdin has no lines
                end = error
        self._lines.put(end)


def _check_start(path: str, start: bytes) -> None:
    """Raise TgenError for a file that has no lines of text, by its first bytes."""
    if b"\0" in start:
        hint = "save it as lines of UTF-8, uncompressed; a row can have bytes as prompt_bytes"
        raise TgenError(f"{path} has NUL bytes, so it is not text in UTF-8", hint)
    if path.endswith(".json") and start.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        raise TgenError(f"{path} is a JSON list", "write one JSON object per line: jq -c '.[]'")


def recognize_rows(first: bytes) -> tuple[bytes, bool]:
    """Return the first line without a byte order mark, and whether the lines are JSON objects;
    otherwise, each is a prompt."""
    line = first.removeprefix(BOM_UTF8)
    return line, line.lstrip(b" \t").startswith(b"{")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The checked fields of a row."""

    prompt: bytes  # of a chat, the last message
    messages: list[dict[str, str]] | None  # of a chat
    sampling: dict[str, Any]  # fields of SamplingConfig
    samples: int
    echo: bool


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line of JSONL. Raises UsageError if it is not an object."""
    try:
        parsed = json.loads(
            line.decode("utf-8-sig"),
            object_pairs_hook=_make_object,
            parse_float=_parse_float,
            parse_constant=_reject_constant,
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not JSON: {error}", _EXAMPLE) from None
    except (ValueError, RecursionError):
        raise UsageError("a number is too long, or the nesting too deep", _EXAMPLE) from None
    if not isinstance(parsed, dict):
        raise UsageError("not a JSON object", _EXAMPLE)
    _check_depth(parsed)
    values: dict[str, Any] = {}
    for key, value in parsed.items():
        name = _SHORT.get(key, key.replace("-", "_"))
        if name in values:
            raise UsageError(f"{name} is given twice", "remove one of them")
        values[name] = value
    return values


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{twice[:60]} is given twice", "remove one of them")
    return values


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # JSON output could not represent it
        raise UsageError(f"a number is out of range (got {text[:60]})", "write a smaller number")
    return value


def _reject_constant(name: str) -> None:
    raise UsageError(f"not JSON: {name} is not a JSON number", "write null or a number")


def _check_depth(row: dict[str, Any]) -> None:
    level: list[Any] = [row]
    for _ in range(_MAX_DEPTH):
        children = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for many in children for one in many if isinstance(one, (dict, list))]
    if level:
        message = f"lists or objects are nested too deeply (limit {_MAX_DEPTH})"
        raise UsageError(message, "flatten the row")


def check_row(values: dict[str, Any], *, samples: int, echo: bool) -> Row:
    """Check the fields of a row but `id`; SamplingConfig checks the values of its own.

    Raises UsageError for invalid ones.
    """
    for name in values.keys() - _ROW_FIELDS:
        _check_name(name)
    values = {k: v for k, v in values.items() if v is not None or k in _OPTIONAL}
    prompts = {name: values.pop(name, None) for name in ("messages", "prompt", "prompt_bytes")}
    given = [name for name, value in prompts.items() if value is not None]
    if not given:
        raise UsageError("no prompt", _EXAMPLE)
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} are both given", "remove one of them")
    messages = _check_messages(prompts["messages"]) if given == ["messages"] else None
    prompt = messages[-1]["content"] if messages else prompts[given[0]]
    samples, echo = values.pop("samples", samples), values.pop("echo", echo)
    is_count = type(samples) is int and 1 <= samples <= MAX_SAMPLES
    _check("samples", samples, is_count, f"a whole number from 1 to {MAX_SAMPLES:,}")
    _check("echo", echo, isinstance(echo, bool), "true or false")
    if echo and messages:
        raise UsageError("echo cannot be combined with messages", "remove one of them")
    return Row(
        prompt=_encode(given[0], prompt),
        messages=messages,
        samples=samples,
        echo=echo,
        sampling=values,
    )


def _check_messages(messages: Any) -> list[dict[str, str]]:
    """Return the messages of a chat that the assistant answers.

    `weight`, which is for training, is ignored.
    """
    valid = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    _check("messages", messages, bool(valid), _MESSAGES)
    chat = [{k: v for k, v in m.items() if k != "weight" and v is not None} for m in messages]
    for i, message in enumerate(chat):
        strings = all(isinstance(value, str) for value in message.values())
        valid = message.keys() == {"role", "content"} and strings
        _check(f"messages[{i}]", messages[i], valid, "an object with role and content, two strings")
    if chat[-1]["role"] == "assistant":
        raise UsageError(
            "messages: the last one is of the assistant, so nothing is left to answer",
            "remove it: the assistant writes the next message",
        )
    return chat


def _encode(name: str, prompt: Any) -> bytes:
    """Return a prompt's bytes; `prompt_bytes` is base64, for prompts that are not UTF-8."""
    if name == "prompt_bytes":
        try:
            return base64.b64decode(prompt, validate=True)
        except (TypeError, ValueError):
            raise UsageError("prompt_bytes: not base64", "encode the prompt's bytes") from None
    _check(name, prompt, isinstance(prompt, str), "a string")
    try:
        return str(prompt).encode("utf-8", "strict" if name == "prompt" else "surrogateescape")
    except UnicodeEncodeError:
        hint = "pass prompt_bytes instead" if name == "prompt" else "remove it"
        raise UsageError(f"{name}: unpaired surrogate", hint) from None


def _check_name(name: str) -> None:
    """Check the name of a field of SamplingConfig."""
    known = {one.name for one in fields(SamplingConfig)}
    if name in _GLOBAL_ONLY:
        raise UsageError(f"{name} applies to all rows", "set it on the command line")
    if name not in known:
        similar = suggest(name.lower(), sorted({*known, *_ROW_FIELDS}))
        hint = similar or "run `tgen generate --help` for a list"
        raise UsageError(f"unknown field {name[:60]!r}", hint)


def _check(name: str, value: Any, valid: bool, expected: str) -> None:
    require(valid, name, json.dumps(value), expected)
