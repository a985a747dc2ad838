"""The output of `tgen tokenize`: a colored view, ids, counts or JSON."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

from tgen.cli import console
from tgen.drawing.colormap import highlight
from tgen.drawing.terminal_text import json_line, label, one_line, to_json
from tgen.reports.json_text import json_text
from tgen.reports.number_format import count

if TYPE_CHECKING:
    from tgen.tokenizer import Tokenizer


_SCHEMA = "tgen.tokenize/1"
_SHADES = (0.25, 0.9, 0.5, 0.75)  # neighboring tokens have different colors
_LINES = f"{'token':>8} {'id':>7} {'byte':>9}  text"
_COUNTS = f"{'tokens':>11} {'bytes':>13} {'bytes/token':>11}  text"
Pieces = Iterable[tuple[bytes, list[int]]]  # parts of a text with their ids


@dataclass
class Counts:
    """Numbers of one text or of several, as far as they have been read."""

    n_tokens: int = 0
    n_bytes: int = 0

    def count(self, pieces: Pieces) -> Iterator[tuple[bytes, list[int]]]:
        """Pass the pieces on; add their tokens and bytes."""
        for text, ids in pieces:
            self.n_tokens += len(ids)
            self.n_bytes += len(text)
            yield text, ids


def write_texts(
    texts: Iterable[tuple[str, Pieces]],
    *,
    model: str,
    tokenizer: "Tokenizer",
    ids: bool,
    counts: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Write each text, given with its name: its `ids`, or only `counts`, or as `json`, or to be
    looked at."""
    write: Callable[[str, Pieces, Counts], None] = partial(_write_view, tokenizer)
    if json:
        write = partial(_write_json, model, tokenizer, only_counts=counts)
    elif counts:
        console.show(Text(_COUNTS, style="bold"), wrap=False)
        write = _write_counts
    elif ids:
        write = _write_ids
    all_counts = []
    for name, pieces in texts:
        all_counts.append(own := Counts())
        write(name, own.count(pieces), own)
    total = Counts(sum(one.n_tokens for one in all_counts), sum(one.n_bytes for one in all_counts))
    if counts and not json and len(all_counts) > 1:
        _show_counts(total, "total")
    elif not counts:
        numbers = f"{count(total.n_tokens, 'token')}, {count(total.n_bytes, 'byte')}"
        console.print_status(numbers, quiet=quiet)


def _write_counts(name: str, pieces: Pieces, counts: Counts) -> None:
    for _ in pieces:
        pass
    _show_counts(counts, name)


def _show_counts(counts: Counts, name: str) -> None:
    rate = f"{counts.n_bytes / counts.n_tokens:.2f}" if counts.n_tokens else "–"
    line = f"{counts.n_tokens:>11,} {counts.n_bytes:>13,} {rate:>11}  {one_line(name)}"
    console.show(Text(line), wrap=False)


def _write_ids(_name: str, pieces: Pieces, _counts: Counts) -> None:
    """Write the ids on one line."""
    separator = ""
    for _, ids in pieces:
        console.write((separator + " ".join(map(str, ids))).encode())
        separator = " "
    console.write(b"\n")


def _write_json(
    model: str,
    tokenizer: "Tokenizer",
    name: str,
    pieces: Pieces,
    counts: Counts,
    *,
    only_counts: bool,
) -> None:
    """Write one JSON object, the tokens as they are computed."""
    record: dict[str, Any] = {"schema": _SCHEMA, "model": model, "name": name}
    record["bos_ids"] = list(tokenizer.bos_ids)
    separator = to_json(record).removesuffix("}") + ', "tokens": ['
    for _, ids in pieces:
        if not only_counts and ids:
            tokens = ({"id": i} | json_text(tokenizer.token_bytes(i)) for i in ids)
            console.write((separator + ", ".join(map(to_json, tokens))).encode())
            separator = ", "
    if only_counts:
        console.write(json_line(record | asdict(counts)))
    else:
        start = "" if counts.n_tokens else separator
        console.write(f"{start}], ".encode() + json_line(asdict(counts)).removeprefix(b"{"))


def _write_view(tokenizer: "Tokenizer", name: str, pieces: Pieces, _counts: Counts) -> None:
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
