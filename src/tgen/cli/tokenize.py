"""`tgen tokenize`: text -> token ids and pieces, and back; shown in color, as counts or as JSON."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.options import (
    json_option,
    make_command,
    model_option,
    quiet_option,
    reading_options,
)
from tgen.config.option import option
from tgen.config.reading import PANEL, Reading
from tgen.errors import UsageError

if TYPE_CHECKING:
    from tgen.corpus.sources import Source
    from tgen.tokenizer import Tokenizer


_PIECE = 1 << 21  # bytes tokenized at a time; training cuts texts into such pieces too
_SEPARATORS = re.compile(rb"[\s,\[\]]+")


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

    --ids and --decode are inverse to each other, byte for byte, unless the tokenizer normalizes
    texts.
    """
    from tgen.checkpoint.model_lookup import find_model
    from tgen.cli.tokenize_output import write_texts
    from tgen.lora.merging import load_tokenizer

    if not options.files and options.prompt is None and sys.stdin and sys.stdin.isatty():
        raise UsageError("no text", 'name a file, pass --prompt "TEXT", or pipe text in')
    path = find_model(options.model).path
    tokenizer = load_tokenizer(path)
    console.print_status(str(path), quiet=options.quiet)
    if options.decode:
        for source in _open_sources(options, options.files or ["-"]):
            _decode(source, tokenizer, quiet=options.quiet)
        return

    texts = ((name, _encode(pieces, tokenizer)) for name, pieces in _split_texts(options))
    write_texts(
        texts,
        model=str(path),
        tokenizer=tokenizer,
        ids=options.ids,
        counts=options.count,
        json=options.json,
        quiet=options.quiet,
    )


def _split_texts(options: TokenizeOptions) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the name of each text and its pieces. Plain text on stdin may be endless, so it is not
    stored."""
    from tgen.corpus.documents import LongText
    from tgen.corpus.opening import HEAD, is_plain_text
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
    from tgen.corpus.opening import ReadingReport, open_sources
    from tgen.corpus.sources import Source

    if options.prompt is not None and options.prompt != "-":
        Reading(**options.reading).check_used("--prompt")
        yield Source("--prompt", os.fsencode(options.prompt))
        return
    reading, report = Reading(**options.reading), ReadingReport()
    if options.decode:
        reading = Reading(read_as="bytes")
    yield from open_sources(
        names,
        report,
        _own_files,
        reading,
        keep_rows=reading.read_as != "rows",
        stdin_head=stdin_head,
    )
    for note in report.notes():
        console.print_status(f"note: {note}", quiet=options.quiet)


def _own_files(directory: Path) -> set[str]:
    from tgen.runs.output_folder import own_files  # slow; only needed for directories

    return own_files(directory)


def _encode(pieces: Iterator[bytes], tokenizer: "Tokenizer") -> Iterator[tuple[bytes, list[int]]]:
    """Yield each piece of a text with its ids."""
    offset = 0
    for piece in pieces:
        yield piece, tokenizer.encode(piece, continuation=offset > 0, offset=offset)
        offset += len(piece)


def _decode(source: "Source", tokenizer: "Tokenizer", *, quiet: bool) -> None:
    """Write the text of ids to stdout."""
    words = filter(None, _SEPARATORS.split(source.read(0, source.n_bytes)))
    ids = [_parse_id(word, tokenizer.vocab_size) for word in words]
    console.write(tokenizer.decode(ids))
    if n_silent := sum(not tokenizer.token_bytes(i) for i in ids):
        console.print_status(f"note: special tokens without text: {n_silent:,}", quiet=quiet)


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


command = make_command(tokenize, TokenizeOptions, (PANEL,))
