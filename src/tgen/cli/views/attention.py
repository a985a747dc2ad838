"""One head's attention as a table whose cells glow with their weight, and the mask it obeys."""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tgen.cli.views.tokens import label
from tgen.reports import AttentionReport, ModelSummary, Prediction

_CELL = 4  # columns of a key at least: up to three digits and a space
_ROW_HEAD = 14  # columns of a query's number and label
_MASK_LIMIT = 32

# From dark violet over green to yellow: even steps of lightness, so that it reads in grey too.
_RAMP = [
    (68, 1, 84),
    (70, 50, 127),
    (54, 92, 141),
    (39, 127, 142),
    (31, 161, 135),
    (74, 194, 109),
    (159, 218, 58),
    (253, 231, 37),
]


def attention_table(
    report: AttentionReport, tokens: Sequence[bytes], *, width: int
) -> tuple[Table, str]:
    """The last rows and columns that fit `width` terminal cells, and a line that says what is cut.

    Cells are percent of a query's attention; the colour follows the square root of the weight.
    """
    n, room = len(tokens), width - _ROW_HEAD
    shown = max(1, min(n, room // _CELL))
    longest = 1 + max(cell_len(label(token)) for token in tokens)
    cell = max(_CELL, min(longest, room // shown))
    first = n - shown
    table = Table(box=None, padding=0, pad_edge=False, show_header=True, header_style="bold")
    table.add_column("query", width=_ROW_HEAD - 1, no_wrap=True)
    for key in range(first, n):
        table.add_column(
            Text(f"{key}\n{label(tokens[key], width=cell - 1)}", justify="right"),
            width=cell,
            justify="right",
            no_wrap=True,
        )
    for query in range(first, n):
        row = report.weights[query]
        cells = [_cell(row[key], cell) if key <= query else Text("") for key in range(first, n)]
        head = f"{query:>4} {label(tokens[query], width=_ROW_HEAD - 7)}"
        table.add_row(Text(head, no_wrap=True), *cells)
    caption = (
        f"layer {report.layer}, head {report.head}: "
        "percent of each query's attention by key; · is below 0.5"
    )
    if first:
        seen = sum(sum(row[first:]) for row in report.weights[first:]) / shown
        caption += (
            f"\ntokens {first} to {n - 1} of {n} fit here and hold {seen:.0%} of their attention; "
            "--json has all"
        )
    return table, caption


def _cell(weight: float, width: int) -> Text:
    digits = f"{weight * 100:.0f}" if weight >= 0.005 else "·"
    place = weight**0.5 * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)
    )
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 120
    colour = "black" if light else "white"
    return Text(
        f"{digits:>{width - 1}} ", style=Style(color=colour, bgcolor=f"rgb({red},{green},{blue})")
    )


def mask_picture(n_tokens: int) -> str:
    """The causal mask: a filled square where the row's token may look at the column's."""
    n = min(n_tokens, _MASK_LIMIT)
    lines = ["■ " * (row + 1) + "· " * (n - row - 1) for row in range(n)]
    more = f"\n(the first {n} of {n_tokens} tokens)" if n < n_tokens else ""
    return "\n".join(line.rstrip() for line in lines) + more


def prediction_table(predictions: Sequence[Prediction]) -> Table:
    """The candidates for the next token, a bar for each probability."""
    table = Table(
        title="next token", title_justify="left", box=None, padding=(0, 1), pad_edge=False
    )
    table.add_column("token")
    table.add_column("id", justify="right")
    table.add_column("probability", justify="right")
    table.add_column("logit", justify="right")
    table.add_column("")
    for candidate in predictions:
        table.add_row(
            Text(label(candidate.text, width=20)),
            str(candidate.id),
            f"{candidate.probability:.1%}",
            f"{candidate.logit:.2f}",
            "█" * round(candidate.probability * 30),
        )
    return table


def summary_table(summary: ModelSummary) -> tuple[Table, str]:
    """What the model's parts weigh, and in words its shape."""
    fields = summary.fields
    groups: dict[str, int] = {}
    for name, _, count in summary.parameters:
        part = name.removesuffix(".weight").removesuffix(".bias").split(".")
        group = f"blocks · {part[2]}" if part[0] == "blocks" else part[0]
        groups[group] = groups.get(group, 0) + count
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("part")
    table.add_column("parameters", justify="right")
    for group, count in groups.items():
        table.add_row(group, f"{count:,}")
    table.add_row("all", f"{summary.n_parameters:,}", style="bold")
    words = (
        f"{summary.family}: {fields['n_layers']} layers, {fields['n_heads']} heads "
        f"({fields['n_kv_heads']} of keys), {fields['d_model']} wide, vocabulary "
        f"{fields['vocab_size']:,}, context {fields['context_length']:,}\n"
        f"{fields['position']} positions, {fields['norm']}, {fields['activation']}; "
        f"{summary.weight_bytes / 2**20:.1f} MiB of weights, "
        f"{summary.cache_bytes_per_token:,} bytes of KV cache a token"
    )
    return table, words
