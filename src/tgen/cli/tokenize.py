"""`tgen tokenize`: text -> token ids and pieces, and back; shown in color, as counts or as JSON."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.style import Style
from rich.text import Text

from tgen.cli import console
from tgen.cli.options import json_option, make_command, model_option, quiet_option
from tgen.config.option import check_ranges, option
from tgen.drawing.colormap import highlight
from tgen.drawing.terminal_text import count, json_line, label, one_line, to_json
from tgen.errors import UsageError
from tgen.reports.json_text import json_text

if TYPE_CHECKING:
    from tgen.corpus.sources import Source
    from tgen.tokenizer import Tokenizer

_SCHEMA = "tgen.tokenize/1"
_SHADES = (0.25, 0.9, 0.5, 0.75)  # neighboring tokens have different colors
_LINES = f"{'token':>8} {'id':>7} {'byte':>9}  text"
_COUNTS = f"{'tokens':>11} {'bytes':>13} {'bytes/token':>11}  text"

Pieces = Iterable[tuple[bytes, list[int]]]  # parts of a text with their ids
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
        None, "Text to tokenize instead of files.", "--prompt -p", metavar="TEXT"
    )
    model: str | None = model_option()
    ids: bool = option(False, "Write only the ids, separated by spaces.", "--ids")
    count: bool = option(False, "Write only the numbers of tokens and bytes.", "--count")
    decode: bool = option(
        False, "Write the text of ids, which are separated by spaces or commas.", "--decode"
    )
    json: bool = json_option("Write one JSON object per text.", panel="")
    quiet: bool = quiet_option(panel="")

    def __post_init__(self) -> None:
        check_ranges(self)
        forms = {"--ids": self.ids, "--count": self.count, "--decode": self.decode}
        given = [flag for flag, is_given in (forms | {"--json": self.json}).items() if is_given]
        if len(given) > 1 and given != ["--count", "--json"]:
            raise UsageError(f"{given[0]} cannot be combined with {given[1]}", "remove one of them")
        if self.files and self.prompt is not None:
            raise UsageError("--prompt cannot be combined with files", "remove one of them")


class Counts(NamedTuple):
    """Numbers of a text."""

    n_tokens: int
    n_bytes: int


def write_texts(
    texts: Iterable[tuple[str, Pieces]],
    options: TokenizeOptions,
    *,
    model: str,
    tokenizer: "Tokenizer",
) -> None:
    """Write each text, given with its name, in the form that the options ask for."""
    write: Callable[[str, Pieces], Counts] = partial(_write_view, tokenizer)
    if options.json:
        write = partial(_write_json, model, tokenizer, only_counts=options.count)
    elif options.count:
        console.show(Text(_COUNTS, style="bold"), wrap=False)
        write = _write_counts
    elif options.ids:
        write = _write_ids
    all_counts = [write(name, pieces) for name, pieces in texts]
    total = Counts(sum(n for n, _ in all_counts), sum(n for _, n in all_counts))
    if options.count and not options.json and len(all_counts) > 1:
        _show_counts(total, "total")
    elif not options.count:
        numbers = f"{count(total.n_tokens, 'token')}, {count(total.n_bytes, 'byte')}"
        console.print_status(numbers, quiet=options.quiet)


def _counted(pieces: Pieces, n: list[int]) -> Iterator[tuple[bytes, list[int]]]:
    """Pass the pieces on; add their tokens and bytes to `n`."""
    for text, ids in pieces:
        n[0] += len(ids)
        n[1] += len(text)
        yield text, ids


def _write_counts(name: str, pieces: Pieces) -> Counts:
    n = [0, 0]
    for _ in _counted(pieces, n):
        pass
    _show_counts(Counts(*n), name)
    return Counts(*n)


def _show_counts(counts: Counts, name: str) -> None:
    n_tokens, n_bytes = counts
    rate = f"{n_bytes / n_tokens:.2f}" if n_tokens else "–"
    line = f"{n_tokens:>11,} {n_bytes:>13,} {rate:>11}  {one_line(name)}"
    console.show(Text(line), wrap=False)


def _write_ids(name: str, pieces: Pieces) -> Counts:
    """Write the ids on one line."""
    del name
    n = [0, 0]
    separator = ""
    for _, ids in _counted(pieces, n):
        console.write((separator + " ".join(map(str, ids))).encode())
        separator = " "
    console.write(b"\n")
    return Counts(*n)


def _write_json(
    model: str, tokenizer: "Tokenizer", name: str, pieces: Pieces, *, only_counts: bool
) -> Counts:
    """Write one JSON object, the tokens as they are computed."""
    n = [0, 0]
    record: dict[str, Any] = {"schema": _SCHEMA, "model": model, "name": name}
    record["bos_ids"] = list(tokenizer.bos_ids)
    separator = to_json(record).removesuffix("}") + ', "tokens": ['
    for _, ids in _counted(pieces, n):
        if not only_counts and ids:
            tokens = ({"id": i} | json_text(tokenizer.token_bytes(i)) for i in ids)
            console.write((separator + ", ".join(map(to_json, tokens))).encode())
            separator = ", "
    counts = {"n_tokens": n[0], "n_bytes": n[1]}
    if only_counts:
        console.write(json_line(record | counts))
    else:
        start = "" if n[0] else separator
        console.write(f"{start}], ".encode() + json_line(counts).removeprefix(b"{"))
    return Counts(*n)


def _write_view(tokenizer: "Tokenizer", name: str, pieces: Pieces) -> Counts:
    """Write the text with its tokens in colors, if the terminal has them, and a line per token."""
    has_color = console.has_color_ramp()
    if name not in ("-", "--prompt"):
        console.show(Text(one_line(name), style="dim"), wrap=False)
    n, number, offset = [0, 0], 0, 0
    for _, ids in _counted(pieces, n):
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
    return Counts(*n)


def _style(number: int) -> Style:
    return highlight(_SHADES[number % len(_SHADES)])


def tokenize(options: TokenizeOptions) -> None:
    """Show how a model's tokenizer splits a text, or decode ids into text.

    Each line has a token's number, its id, the offset of its first byte in the text, and its text;
    on a terminal with colors, the colored text precedes them. Special tokens spelled out in a text
    are text. A token that a model puts before each prompt is not shown.

    --ids and --decode are inverse to each other, byte for byte, unless the tokenizer normalizes
    texts.
    """
    from tgen.checkpoint.model_lookup import find_model
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
    write_texts(texts, options, model=str(path), tokenizer=tokenizer)


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
    from tgen.corpus.sources import Source, open_sources

    if options.prompt is not None and options.prompt != "-":
        yield Source("--prompt", os.fsencode(options.prompt))
        return
    skipped: list[str] = []
    yield from open_sources(options.files or ["-"], skipped)
    for name in skipped:
        console.print_status(f"warning: {name} is skipped: a binary file", quiet=options.quiet)


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
