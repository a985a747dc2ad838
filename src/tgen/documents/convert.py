"""Convert documents to text in a child process with limits of time, memory and size."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgen.documents.kinds import UNREADABLE
from tgen.errors import CorpusError
from tgen.machine.child import WALL_TIME, Child, has_used_its_cpu_time
from tgen.storage import files

SECONDS, SECONDS_PER_MB, MAX_SECONDS = 30, 30, 3600  # of CPU time
_BYTES, _BYTES_PER_BYTE = 1 << 30, 8  # of memory, where the platform supports a limit
_TEXT_BYTES, _TEXT_PER_BYTE = 1 << 26, 100  # of text: 64 MiB and 100 per byte of the file
_BLOCK = 1 << 20
_LONG_HINT = "convert it to text yourself, or split it"


@dataclass(frozen=True)
class ConvertedDocument:
    """The texts of a document, in UTF-8 with LF, separated by `<|endoftext|>`."""

    spool: files.RandomAccessFile
    left_out: dict[str, int]  # what has no text, such as "picture", and how many


_child = Child("-m", "tgen.documents.read_child")  # starts at the first document


def convert_document(
    content: Path | files.RandomAccessFile,
    kind: str,
    *,
    name: str = "",
    encoding: str | None = None,
) -> Generator[float, None, ConvertedDocument]:
    """Convert a document in a process that all calls share; see `document_kind` for `kind`. Yield
    the finished fraction of a long one.

    `name` is that of the content in messages; `encoding` that of a text that does not declare it,
    None is UTF-8. Raises CorpusError if the document is damaged, encrypted, too large or without
    text, or if a library is missing.
    """
    name = name or str(content)
    if kind in UNREADABLE:
        problem, hint = UNREADABLE[kind]
        raise CorpusError(f"{name} {problem}", hint)
    file = files.open_random_access(content) if isinstance(content, Path) else content
    n_bytes = file.stamp[0]
    seconds = min(MAX_SECONDS, SECONDS + SECONDS_PER_MB * n_bytes // 1_000_000)
    request = {
        "kind": kind,
        "encoding": encoding,
        "path": os.path.abspath(content) if isinstance(content, Path) else None,
        "n_bytes": n_bytes,
        "seconds": seconds,
        "memory": _BYTES + _BYTES_PER_BYTE * n_bytes,
        "max_text": _TEXT_BYTES + _TEXT_PER_BYTE * n_bytes,
    }
    process = spool = None
    try:
        spool = files.open_temporary(None)
        with _child.use(WALL_TIME * seconds) as process:
            answer = yield from _exchange(process, request, file, spool, name)
            if answer.get("kill"):
                raise _problem(name, answer)
        if "problem" in answer:
            raise _problem(name, answer)
        return ConvertedDocument(spool, answer["left_out"])
    except (TimeoutError, EOFError, ValueError, BrokenPipeError) as error:  # killed, or exited
        is_slow = isinstance(error, TimeoutError) or has_used_its_cpu_time(process)
        problem = f"takes more than {seconds} s to read" if is_slow else "crashed its reader"
        raise CorpusError(f"{name} {problem}", _LONG_HINT) from None
    finally:
        if sys.exc_info()[0] is not None and spool is not None:
            spool.close()
        if isinstance(content, Path):
            file.close()


def close_converter() -> None:
    """End the process of `convert_document`, unless another thread uses it; the next document
    starts it again."""
    _child.close()


def _exchange(
    child: subprocess.Popen[bytes],
    request: dict[str, Any],
    file: files.RandomAccessFile,
    spool: files.RandomAccessFile,
    name: str,
) -> Generator[float, None, dict[str, Any]]:
    """Send a document, store its texts, yield its progress, and return the last answer."""
    assert child.stdin
    assert child.stdout
    child.stdin.write(json.dumps(request).encode() + b"\n")
    for position in range(0, request["n_bytes"] if request["path"] is None else 0, _BLOCK):
        n = min(_BLOCK, request["n_bytes"] - position)
        child.stdin.write(file.read(position, n).ljust(n, b"\0"))
    child.stdin.flush()
    while line := child.stdout.readline():
        answer: dict[str, Any] = json.loads(line)
        if "progress" in answer:
            yield answer["progress"]
        elif "text" in answer:
            text = child.stdout.read(answer["text"])
            if len(text) < answer["text"]:
                break
            try:
                spool.append(text)
            except OSError as error:
                what = f"cannot store the text of {name} in a temporary file: {error.strerror}"
                raise CorpusError(what, "free disk space") from None
        else:
            return answer
    raise EOFError


def _problem(name: str, answer: dict[str, Any]) -> CorpusError:
    """Return the error in an answer; `read_child.py` describes it."""
    return CorpusError(f"{name} {answer['problem']}", answer["hint"])
