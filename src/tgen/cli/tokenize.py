"""`tgen tokenize`: text -> token ids and pieces, and back; shown in color, as counts or as JSON."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

from tgen.cli import console
from tgen.cli.json_output import json_line, printable_json
from tgen.cli.options import (
    json_option,
    make_command,
    model_option,
    quiet_option,
    reading_options,
)
from tgen.config.input_files import Reading
from tgen.config.option import option
from tgen.drawing.colormap import highlight
from tgen.drawing.terminal_text import label, one_line
from tgen.errors import UsageError
from tgen.reports.number_format import count

if TYPE_CHECKING:
    from tgen.corpus.sources import Source
    from tgen.tokenizer import Tokenizer


_PIECE = 1 << 21  # bytes tokenized at a time; training cuts texts into such pieces too
_SEPARATORS = re.compile(rb"[\s,\[\]]+")
_SCHEMA = "tgen.tokenize/1"
_SHADES = (0.25, 0.9, 0.5, 0.75)  # neighboring tokens have different colors
_LINES = f"{'token':>8} {'id':>7} {'byte':>9}  text"
_COUNTS = f"{'tokens':>11} {'bytes':>13} {'bytes/token':>11}  text"
_Pieces = Iterable[tuple[bytes, list[int]]]  # parts of a text with their ids


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """The options of `tgen tokenize`."""

    files: list[str] = option(
        default_factory=list,
        help_text="Files, directories, glob patterns, or - for stdin; by default stdin.",
        argument=True,
        metavar="FILE",
    )
    prompt: str | None = option(
        None, "Text to tokenize instead of files.", "--prompt -p", metavar="TEXT", excludes="files"
    )
    reading: dict[str, Any] = reading_options()
    model: str | None = model_option()
    ids: bool = option(
        False, "Write only the ids, separated by spaces.", "--ids", excludes="count decode json"
    )
    count: bool = option(
        False, "Write only the numbers of tokens and bytes.", "--count", excludes="decode"
    )
    decode: bool = option(
        False,
        "Write the text of ids, which are separated by spaces or commas.",
        "--decode",
        excludes="json read_as encoding columns text_column skip_bad_rows",
    )
    json: bool = json_option("Write one JSON object per text.", panel="")
    quiet: bool = quiet_option(panel="")


def tokenize(options: TokenizeOptions) -> None:
    """Show how a model's tokenizer splits a text, or decode ids into text.

    Each line has a token's number, its id, the offset of its first byte in the text, and its text;
    on a terminal with colors, the colored text precedes them. Special tokens spelled out in a text
    are treated as text. A token that a model puts before each prompt is not shown.

    --ids and --decode are inverses of each other, byte for byte, unless the tokenizer normalizes
    texts.
    """
    from tgen.checkpoint.model_lookup import find_model
    from tgen.lora.model_with_adapter import load_tokenizer

    if not options.files and options.prompt is None and sys.stdin and sys.stdin.isatty():
        raise UsageError("no text", 'name a file, pass --prompt "TEXT", or pipe text in')
    path = find_model(options.model).path
    tokenizer = load_tokenizer(path)
    console.print_status(str(path))
    if options.decode:
        for source in _open_sources(options, options.files or ["-"]):
            _decode(source, tokenizer)
        return

    texts = ((name, _encode(pieces, tokenizer)) for name, pieces in _split_texts(options))
    _write_texts(texts, str(path), tokenizer, options)


def _split_texts(options: TokenizeOptions) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the name of each text and its pieces. Plain text on stdin may be endless, so it is not
    stored."""
    from tgen.corpus.document_table import LongText
    from tgen.corpus.open_sources import HEAD, is_plain_text
    from tgen.corpus.sources import stdin
    from tgen.corpus.tokenize import split_stream, split_text

    names = (options.files or ["-"]) if options.prompt in (None, "-") else [""]
    as_bytes = options.reading.get("read_as") == "bytes"
    for name in names:
        head = stdin().read(min(HEAD, _PIECE)) if name == "-" else b""
        if name == "-" and (as_bytes or (not options.reading and is_plain_text(head))):
            blocks = chain([head], iter(partial(stdin().read, _PIECE), b""))
            yield name, split_stream(partial(_next_block, blocks), _PIECE)
            continue
        for source in _open_sources(options, [name] if name else [], head):
            yield source.name, split_text(LongText(source, 0, source.n_bytes), _PIECE)
            source.close()


def _next_block(blocks: Iterator[bytes], _: int) -> bytes:
    return next(blocks, b"")


def _open_sources(
    options: TokenizeOptions, names: list[str], stdin_head: bytes = b""
) -> "Iterator[Source]":
    """Open the texts one by one; JSON and CSV are texts, too."""
    from tgen.corpus.open_sources import ReadingReport, open_sources
    from tgen.corpus.sources import Source

    if options.prompt is not None and options.prompt != "-":
        Reading(**options.reading).check_used("--prompt")
        yield Source("--prompt", os.fsencode(options.prompt))
        return
    reading, report = Reading(**options.reading), ReadingReport()
    if options.decode:
        reading = Reading(read_as="bytes")
    opened = open_sources(
        names,
        report,
        _own_files,
        reading,
        keep_rows=reading.read_as != "rows",
        stdin_head=stdin_head,
    )
    while (source := _next_source(opened)) is not None:
        yield source
    for note in report.notes():
        console.print_status(f"note: {note}")


def _next_source(opened: "Iterator[Source | float]") -> "Source | None":
    """Return the next text, None after the last; the progress bar ends before, or it would mix
    with the output."""
    with console.late_progress("reading") as update:
        for source in opened:
            if not isinstance(source, float):
                return source
            update(source)
    return None


def _own_files(directory: Path) -> set[str]:
    from tgen.runs.output_folder import own_files  # slow; only needed for directories

    return own_files(directory)


def _encode(pieces: Iterator[bytes], tokenizer: "Tokenizer") -> Iterator[tuple[bytes, list[int]]]:
    offset = 0
    for piece in pieces:
        yield piece, tokenizer.encode(piece, continuation=offset > 0, offset=offset)
        offset += len(piece)


def _decode(source: "Source", tokenizer: "Tokenizer") -> None:
    words = filter(None, _SEPARATORS.split(source.read(0, source.n_bytes)))
    ids = [_parse_id(word, tokenizer.vocab_size) for word in words]
    console.write(tokenizer.decode(ids))
    if n_silent := sum(not tokenizer.token_bytes(i) for i in ids):
        console.print_status(f"note: special tokens without text: {n_silent:,}")


def _parse_id(word: bytes, vocab_size: int) -> int:
    if not word.isdigit() or len(word) > 9:
        shown = word[:50].decode(errors="replace")
        hint = "separate the ids by spaces or commas, as --ids writes them"
        raise UsageError(f"--decode: not a token id (got {shown!r})", hint)
    if int(word) >= vocab_size:
        raise UsageError(
            f"--decode: the model has no token {int(word):,}",
            f"use ids from 0 to {vocab_size - 1:,}, or another --model",
        )
    return int(word)


@dataclass
class _Counts:
    """Numbers of tokens and bytes that have been read so far, of one or several texts."""

    n_tokens: int = 0
    n_bytes: int = 0

    def count(self, pieces: _Pieces) -> Iterator[tuple[bytes, list[int]]]:
        """Pass the pieces on; add their tokens and bytes."""
        for text, ids in pieces:
            self.n_tokens += len(ids)
            self.n_bytes += len(text)
            yield text, ids


def _write_texts(
    texts: Iterable[tuple[str, _Pieces]],
    model: str,
    tokenizer: "Tokenizer",
    options: TokenizeOptions,
) -> None:
    """Write each text, given with its name: its ids, its counts, as JSON, or to be looked at."""
    only_counts = options.count and not options.json
    if only_counts:
        console.show(Text(_COUNTS, style="bold"), wrap=False)
    all_counts = []
    for name, pieces in texts:
        all_counts.append(own := _Counts())
        counted = own.count(pieces)
        if options.json:
            _write_json(model, tokenizer, name, counted, own, only_counts=options.count)
        elif only_counts:
            for _ in counted:
                pass
            _show_counts(own, name)
        elif options.ids:
            _write_ids(counted)
        else:
            _write_view(tokenizer, name, counted)
    total = _Counts(sum(one.n_tokens for one in all_counts), sum(one.n_bytes for one in all_counts))
    if only_counts and len(all_counts) > 1:
        _show_counts(total, "total")
    elif not options.count:
        numbers = f"{count(total.n_tokens, 'token')}, {count(total.n_bytes, 'byte')}"
        console.print_status(numbers)


def _show_counts(counts: _Counts, name: str) -> None:
    rate = f"{counts.n_bytes / counts.n_tokens:.2f}" if counts.n_tokens else "–"
    line = f"{counts.n_tokens:>11,} {counts.n_bytes:>13,} {rate:>11}  {one_line(name)}"
    console.show(Text(line), wrap=False)


def _write_ids(pieces: _Pieces) -> None:
    separator = ""
    for _, ids in pieces:
        console.write((separator + " ".join(map(str, ids))).encode())
        separator = " "
    console.write(b"\n")


def _write_json(
    model: str,
    tokenizer: "Tokenizer",
    name: str,
    pieces: _Pieces,
    counts: _Counts,
    *,
    only_counts: bool,
) -> None:
    """Write one JSON object, the tokens as they are computed."""
    from tgen.reports.json_text import json_text  # imports NumPy, which help does not need

    record: dict[str, Any] = {"schema": _SCHEMA, "model": model, "name": name}
    record["bos_ids"] = list(tokenizer.bos_ids)
    separator = printable_json(record).removesuffix("}") + ', "tokens": ['
    for _, ids in pieces:
        if not only_counts and ids:
            tokens = ({"id": i} | json_text(tokenizer.token_bytes(i)) for i in ids)
            console.write((separator + ", ".join(map(printable_json, tokens))).encode())
            separator = ", "
    if only_counts:
        console.write(json_line(record | asdict(counts)))
    else:
        start = "" if counts.n_tokens else separator
        console.write(f"{start}], ".encode() + json_line(asdict(counts)).removeprefix(b"{"))


def _write_view(tokenizer: "Tokenizer", name: str, pieces: _Pieces) -> None:
    """Write the text with its tokens in colors, if the terminal has them, and a line per token."""
    has_color = console.has_color_ramp()
    if name not in ("-", "--prompt"):
        console.show(Text(one_line(name), style="dim"), wrap=False)
    number = offset = 0
    for _, ids in pieces:
        tokens = [tokenizer.token_bytes(i) for i in ids]
        if has_color and tokens:
            strip = Text()
            for i, token in enumerate(tokens, number):
                strip.append(label(token), _style(i))
                if b"\n" in token:
                    strip.append("\n")
            console.show(strip, Text())
        if not number:
            console.show(Text(_LINES, style="bold"), wrap=False)
        for i, token in zip(ids, tokens, strict=True):
            line = Text(f"{number:>8} {i:>7} {offset:>9}  ")
            console.show(line.append(label(token), _style(number) if has_color else ""), wrap=False)
            number += 1
            offset += len(token)


def _style(number: int) -> Style:
    return highlight(_SHADES[number % len(_SHADES)])


command = make_command(tokenize, TokenizeOptions)
