"""The process that reads documents: one request per line of stdin, the texts on stdout.

Documents are untrusted. This process has little time and memory for each, writes no file, and
uses no network; its parent kills it when it takes too long.
"""

import io
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from tgen.documents.kinds import byte_order_mark
from tgen.documents.package import DAMAGED_HINT
from tgen.documents.text_builder import SYMBOLS
from tgen.errors import CorpusError, TgenError, is_out_of_memory
from tgen.machine.resource_limit import limit_cpu_time, set_limit
from tgen.storage import files

_SEPARATOR = b"<|endoftext|>"
_CHANGED = dict.fromkeys([*range(9), 11, *range(13, 32), 127, *range(128, 133), *range(134, 160)])
_CHANGED |= SYMBOLS | {12: "\n", 0x85: "\n", 0xAD: None, 0xFEFF: None}  # without soft hyphens
_UNCHANGED = {"markdown", "notebook"}  # kinds whose text is kept to the character
# Kinds whose readers take files; those of others take texts.
_TAKE_FILES = {"docx", "odt", "epub", "rtf", "mail", "mbox", "mhtml"}
_MODULES = {"mbox": "mail", "mhtml": "mail"}  # of the readers; others have the kind's name
_MODULES |= dict.fromkeys(("whatsapp", "telegram", "discord"), "chats")


def main() -> None:
    """Read documents until the end of stdin.

    The answers of a request are JSON lines: `text`, the bytes of the text that follows; `progress`;
    and at last `left_out`, or the `problem` with its `hint`, after which this process is not used
    any more if `kill`.
    """
    with suppress(ImportError, ValueError):
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        set_limit("RLIMIT_AS", request["memory"])
        limit_cpu_time(request["seconds"])
        try:
            answer: dict[str, Any] = {"left_out": _read(request, out)}
        except Exception as error:
            answer = _describe(error, request)
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()


def _describe(error: Exception, request: dict[str, Any]) -> dict[str, Any]:
    """Return the problem and its hint; a library may raise anything for a damaged file."""
    if is_out_of_memory(error):  # also of the system, for example when it opens a module
        problem = f"needs more than {request['memory'] >> 20:,} MB of memory"
        return {"problem": problem, "kill": True, "hint": "split it into smaller files"}
    if isinstance(error, RecursionError):
        return {"problem": "is nested too deeply", "hint": DAMAGED_HINT}
    if isinstance(error, TgenError):
        return {"problem": _to_line(error.message), "hint": _to_line(error.hint)}
    if isinstance(error, ImportError):
        hint = "install it: pip install 'tgen-lm[documents]'"
        return {"problem": f"needs the library {_to_line(str(error.name))}", "hint": hint}
    reason = _to_line(f"{type(error).__name__}: {error}")
    return {"problem": f"is damaged ({reason})", "hint": DAMAGED_HINT}


def _read(request: dict[str, Any], out: BinaryIO) -> dict[str, int]:
    """Write the texts of a document; return what was left out."""
    kind, left = request["kind"], request["max_text"]
    left_out: Counter[str] = Counter()
    n_texts, shown = 0, time.monotonic()

    def progress(fraction: float) -> None:
        nonlocal shown
        if time.monotonic() - shown > 0.5:
            shown = time.monotonic()
            out.write(json.dumps({"progress": fraction}).encode() + b"\n")
            out.flush()

    with _open(request) as file:
        for text in _texts(request, file, left_out, progress):
            if kind not in _UNCHANGED:
                text = text.translate(_CHANGED).strip("\n")
            if not text.strip():
                continue
            data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            left -= len(data)
            if left < 0:
                raise CorpusError(
                    f"has more than {request['max_text'] >> 20:,} MB of text",
                    "convert it to text yourself if you trust it",
                )
            data = _SEPARATOR + data if n_texts else data
            out.write(json.dumps({"text": len(data)}).encode() + b"\n" + data)
            n_texts += 1
    if not n_texts:
        raise CorpusError("has no text", "remove it, or check it in the program that made it")
    return {what: n for what, n in left_out.items() if n > 0}


@contextmanager
def _open(request: dict[str, Any]) -> Iterator[BinaryIO]:
    if request["path"] is None:  # the content follows in stdin
        yield io.BytesIO(sys.stdin.buffer.read(request["n_bytes"]))
    else:
        with files.open_regular(Path(request["path"])) as file:
            yield file


def _texts(
    request: dict[str, Any],
    file: BinaryIO,
    left_out: Counter[str],
    progress: Callable[[float], None],
) -> Iterator[str]:
    """Call the function `read_<kind>`; only its module imports the libraries that it needs."""
    kind, encoding = request["kind"], request["encoding"]
    module = import_module(f"tgen.documents.{_MODULES.get(kind, kind)}")
    read: Callable[..., Iterator[str]] = getattr(module, f"read_{kind}")
    if kind == "pdf":
        return read(file, left_out, progress)
    if kind in _TAKE_FILES:
        return read(file, left_out)
    if kind == "html":
        return read(file.read(), left_out, encoding)
    return read(_decode(file.read(), encoding), left_out)


def _decode(data: bytes, encoding: str | None) -> str:
    """Return a text with LF; its byte order mark counts more than `encoding`."""
    marked, n_mark = byte_order_mark(data)
    encoding = marked or encoding
    try:
        text = data[n_mark:].decode(encoding or "utf-8").removeprefix("\ufeff")
    except (LookupError, ValueError):
        hint = "save it as UTF-8, or add --encoding NAME, for example cp1252"
        raise CorpusError(f"is not {encoding or 'UTF-8'}", hint) from None
    return re.sub(r"\r{0,2}\n|\r", "\n", text)  # a copy in text mode makes CR CR LF of CR LF


def _to_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:300]


if __name__ == "__main__":
    main()
