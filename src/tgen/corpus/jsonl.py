"""JSONL corpora: {"text"}, {"prompt", "completion"} or {"messages"} rows, one per line."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile

from tgen.corpus.conversation import invalid_row_error, is_conversation, parse_conversation
from tgen.corpus.sources import Source
from tgen.errors import CorpusError

_BLOCK = 1 << 22  # bytes per read
_MAX_LINE = 1 << 27  # bytes; parsing needs several times as much memory
_MAX_FIRST_ROW = 1 << 20  # bytes that tell whether a source has rows
_EXAMPLE = (
    'write {"text": "..."}, {"prompt": "...", "completion": "..."} or {"messages": [...]} '
    "on each line"
)

# Start and end of a document in its source, bytes of its parts, and the content to fingerprint.
Location = tuple[int, int, int, Iterable[bytes]]


def parse_row(line: bytes) -> tuple[bytes, ...] | None:
    """Return the parts of a JSON row, or None if it is not one."""
    try:
        values = json.loads(line)
        parts = (values["text"],) if "text" in values else (values["prompt"], values["completion"])
        return tuple(part.encode("utf-8", "surrogatepass") for part in parts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def find_rows(source: Source, *, chats: bool) -> Iterator[Location]:
    """Yield the location and content of each row, which may be a conversation; CorpusError for an
    invalid one."""
    for number, (start, line) in enumerate(read_lines(source), 1):
        if not line.strip():
            continue
        line = line.rstrip(b"\r\n")
        content: Iterable[bytes]
        try:
            if chats:
                n_bytes, content = len(line), [parse_conversation(line).content()]
            else:
                parts = parse_row(line)
                if parts is None:
                    raise invalid_row_error(line, _EXAMPLE)
                n_bytes = sum(map(len, parts))
                content = chain.from_iterable((encode_length(len(part)), part) for part in parts)
        except CorpusError as error:
            message = f"{source.name}, line {number}: {error.message}"
            raise CorpusError(message, error.hint) from None
        yield start, start + len(line), n_bytes, content


def line_number(source: Source, position: int) -> int:
    """Return the number, from 1, of the line that starts at a byte."""
    return 1 + sum(1 for _ in takewhile(lambda line: line[0] < position, read_lines(source)))


def read_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its line break, and its start."""
    start = position = 0
    unfinished: list[bytes] = []  # joined once: a long line takes many reads
    while block := source.read(position, _BLOCK):
        position += len(block)
        end = block.rfind(b"\n") + 1
        if not end:
            unfinished.append(block)
            if position - start > _MAX_LINE:
                raise CorpusError(
                    f"{source.name} has a row of more than {_MAX_LINE:,} bytes at byte {start:,}",
                    "split the row into several, or put its text into a .txt file",
                )
            continue
        lines, unfinished = b"".join([*unfinished, block[:end]]), [block[end:]]
        for line in lines.splitlines(keepends=True):
            yield start, line
            start += len(line)
    for line in b"".join(unfinished).splitlines(keepends=True):
        yield start, line
        start += len(line)


def contains_rows(source: Source) -> bool:
    """Return whether a source is JSONL, by its name or the first line of stdin."""
    if source.name != "-":
        return source.name.lower().endswith((".jsonl", ".ndjson"))
    line = _beginning(source).split(b"\n", 1)[0]
    return parse_row(line) is not None or is_conversation(line)


def _beginning(source: Source) -> bytes:
    """Return the first bytes of a source after white space."""
    position = 0
    while (block := source.read(position, _BLOCK)).isspace():
        position += len(block)
    position += len(block) - len(block.lstrip())
    return source.read(position, _MAX_FIRST_ROW)


def contains_conversations(source: Source) -> bool:
    """Return whether the first row of a JSONL source has messages."""
    lines = (line for _, line in read_lines(source) if line.strip())
    return is_conversation(next(lines, b""))


def encode_length(n: int) -> bytes:
    """Return the length of a part as it enters the fingerprint."""
    return n.to_bytes(8, "little")
