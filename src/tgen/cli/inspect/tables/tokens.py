"""Table of the text's tokens with their surprisal."""

from rich.style import Style
from rich.table import Table
from rich.text import Text

from tgen.cli.render.colormap import highlight
from tgen.cli.render.tables import table
from tgen.cli.render.token_labels import label
from tgen.cli.terminal_text import count
from tgen.reports.inspection import TextReport, TokenReport

_MAX_BITS = 12.0  # surprisal with the lightest color: a probability of 1/4,096
_MIN_WIDTH = 60  # columns; narrower tables have no token ids and byte offsets


def token_table(
    report: TextReport, *, rows: range, width: int, has_color: bool
) -> list[Table | Text]:
    """Return the text colored by surprisal, and a table with one row per token."""
    strip = Text()
    for token in report.tokens:
        strip.append(label(token.text), _surprisal_style(token))
        if b"\n" in token.text:
            strip.append("\n")
    wide = width >= _MIN_WIDTH
    numbers = [">token", ">id", ">byte"] if wide else [">"]
    columns = table(*numbers, "text", ">bits", ">rank", "predicted", ">")
    for i in rows:
        columns.add_row(*_row(report.tokens[i], wide=wide))
    color = "lighter colors: higher surprisal; " if has_color else ""
    notes = [f"{color}bits: surprisal, -log2 p(token); rank 0: the most likely token"]
    if len(rows) < len(report.tokens):
        which = f"tokens {rows.start} to {rows[-1]}" if len(rows) > 1 else f"token {rows.start}"
        notes.append(f"{which} of {len(report.tokens)}; --query selects others")
    if report.nats_per_token is not None and report.perplexity is not None:
        per_byte = report.bits_per_byte
        bits = "" if per_byte is None else f" · {per_byte:.3f} bits/byte"
        notes.append(
            f"{len(report.tokens)} tokens, {report.n_bytes} bytes · {report.nats_per_token:.3f} "
            f"nats/token · perplexity {report.perplexity:,.5g}{bits} (without the first token)"
        )
    return [strip, Text(), columns, *(Text(note, style="dim") for note in notes)]


def _row(token: TokenReport, *, wide: bool) -> list[str | Text]:
    bits, rank = token.surprisal, token.rank
    top_probability = token.top_probability
    return [
        str(token.index),
        *([str(token.id), str(token.byte_offset)] if wide else []),
        Text(label(token.text, width=20) + _partial_character(token.text)),
        Text("–") if bits is None else Text(f"{bits:.1f}", _surprisal_style(token)),
        "–" if rank is None else f"{rank:,}",
        Text("" if token.top_text is None else label(token.top_text, width=16)),
        "" if top_probability is None else f"{top_probability:.0%}",
    ]


def _partial_character(token: bytes) -> str:
    """Return a note for tokens that are not whole characters."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return f" {count(len(token), 'byte')} of a character"
    return ""


def _surprisal_style(token: TokenReport) -> Style:
    if token.surprisal is None:
        return Style()
    return highlight(token.surprisal / _MAX_BITS)
