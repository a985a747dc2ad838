"""The text, token by token, and how the model saw each coming."""

from rich.style import Style
from rich.table import Table
from rich.text import Text

from tgen.cli.render.colormap import highlight
from tgen.cli.render.tables import table
from tgen.cli.render.token_labels import label
from tgen.reports import TextReport, TokenReport

_MOST_BITS = 12.0  # drawn lightest: one choice of 4,096
_NARROW = 60  # columns; below them ids and bytes are left out


def token_table(
    report: TextReport, *, rows: range, width: int, coloured: bool
) -> list[Table | Text]:
    """The text as a strip that glows where the model was surprised, then a row a token."""
    strip = Text()
    for token in report.tokens:
        strip.append(label(token.text), _glow(token))
        if b"\n" in token.text:
            strip.append("\n")
    whole = width >= _NARROW
    numbers = [">token", ">id", ">byte"] if whole else [">"]
    columns = table(*numbers, "text", ">bits", ">rank", "expected", ">")
    for i in rows:
        columns.add_row(*_row(report.tokens[i], whole=whole))
    light = "light tokens surprised the model; " if coloured else ""
    lines = [f"{light}bits are -log2 of a token's probability, rank 0 is the model's first choice"]
    if len(rows) < len(report.tokens):
        which = f"tokens {rows.start} to {rows[-1]}" if len(rows) > 1 else f"token {rows.start}"
        lines.append(f"{which} of {len(report.tokens)}; --query chooses others")
    if report.nats_per_token is not None and report.perplexity is not None:
        per_byte = report.bits_per_byte
        bits = "" if per_byte is None else f" · {per_byte:.3f} bits/byte"
        lines.append(
            f"{len(report.tokens)} tokens, {report.n_bytes} bytes · {report.nats_per_token:.3f} "
            f"nats a token · perplexity {report.perplexity:,.5g}{bits} (all but the first token)"
        )
    return [strip, Text(), columns, *(Text(line, style="dim") for line in lines)]


def _row(token: TokenReport, *, whole: bool) -> list[str | Text]:
    part = _part_of_character(token.text)
    expected = "" if token.likeliest_text is None else label(token.likeliest_text, width=16)
    chance = token.likeliest_probability
    return [
        str(token.index),
        *([str(token.id), str(token.start)] if whole else []),
        Text(label(token.text, width=20) + part),
        Text("–") if token.surprisal is None else Text(f"{token.surprisal:.1f}", _glow(token)),
        "–" if token.rank is None else f"{token.rank:,}",
        Text(expected),
        "" if chance is None else f"{chance:.0%}",
    ]


def _part_of_character(token: bytes) -> str:
    """For tokens that are no whole characters: how many bytes of what."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return f" {len(token)} byte{'s' * (len(token) > 1)} of a character"
    return ""


def _glow(token: TokenReport) -> Style:
    if token.surprisal is None:
        return Style()
    return highlight(token.surprisal / _MOST_BITS)
