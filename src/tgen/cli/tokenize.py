"""`tgen tokenize`: text -> token ids and pieces, and back; shown in color, as counts or as JSON."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tgen.cli import console
from tgen.cli.options import json_option, make_command, model_option, quiet_option
from tgen.config.option import option
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
        excludes="json",
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
        for source in _open_sources(options):
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
    """Yield the name of each text and its pieces. Stdin may be endless, so it is not stored."""
    from tgen.corpus.documents import LongText
    from tgen.corpus.sources import stdin
    from tgen.corpus.tokenize import split_stream, split_text

    names = (options.files or ["-"]) if options.prompt in (None, "-") else [""]
    for name in names:
        if name == "-":
            yield name, split_stream(stdin().read, _PIECE)
            continue
        for source in _open_sources(replace(options, files=[name] if name else [])):
            yield source.name, split_text(LongText(source, 0, source.n_bytes), _PIECE)
            source.close()


def _open_sources(options: TokenizeOptions) -> "Iterator[Source]":
    """Open the texts one by one."""
    from tgen.corpus.sources import Skipped, Source, open_sources

    if options.prompt is not None and options.prompt != "-":
        yield Source("--prompt", os.fsencode(options.prompt))
        return
    skipped = Skipped()
    yield from open_sources(options.files or ["-"], skipped, _own_files)
    for note in skipped.notes():
        console.print_status(f"warning: {note}", quiet=options.quiet)


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


command = make_command(tokenize, TokenizeOptions)
