"""Table of head metrics, for one model or as a comparison of two.

Columns have fixed widths: a Rich table that fits itself to the terminal would cut numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.style import Style
from rich.text import Text

from tgen.config.index_ranges import name_layers
from tgen.reports.inspection import ROLE_THRESHOLD, HeadReport, HeadsReport
from tgen.reports.number_format import count

_BARS = "▁▂▃▄▅▆▇█"
_NAME_COLUMNS = 16  # width of a head and its role
_HISTOGRAM = "distances"
_MAX_SHIFTS = 5
_BOLD, _DIM = Style(bold=True), Style(dim=True)


@dataclass(frozen=True)
class _Column:
    name: str
    field: str  # field of HeadReport
    width: int
    compare_width: int  # width of a value and its difference; 0: not compared
    meaning: str


# Columns that do not fit are dropped from the end.
_COLUMNS = (
    _Column("Δloss", "ablation_cost", 8, 14, "loss increase without the head, nats/token"),
    _Column("keys", "effective_keys", 5, 11, "effective number of keys, exp(entropy)"),
    _Column("dist", "distance", 6, 0, "mean distance from query to key, in tokens"),
    _Column("self", "self", 5, 0, "attention weight on the query's own position"),
    _Column("prev", "previous", 5, 11, "attention weight on the previous token"),
    _Column("first", "first", 6, 11, "attention weight on the first token, over all queries"),
    _Column(
        "duplicate", "duplicate", 10, 11, "attention weight on the token's earlier copy / control"
    ),
    _Column(
        "induction", "induction", 10, 11, "attention weight on the token after that copy / control"
    ),
    _Column(
        "text",
        "text_induction",
        5,
        0,
        "attention weight on the token after an earlier copy, this text",
    ),
)
COLUMN_MEANINGS = {
    "head": "layer and head",
    "role": "the score furthest above its baseline or control, if clearly above",
    **{column.name: column.meaning for column in _COLUMNS},
    _HISTOGRAM: "attention weight 0, 1, 2-3, 4-7, ... tokens back",
}
_NUMBERS = ("effective_keys", "distance")  # not shares from 0 to 1


def heads_table(report: HeadsReport, *, width: int | None) -> list[Text]:
    """Return the metrics of the heads and of uniform attention, and what the columns mean.

    Columns that do not fit into `width` are only named; None: no limit.
    """
    available = [c for c in _COLUMNS if c.field != "ablation_cost" or report.loss is not None]
    columns = _fit(available, [c.width for c in available], width)
    n_bars = len(report.heads[0].distance_histogram)
    if width is not None:
        room = width - _NAME_COLUMNS - sum(c.width for c in columns) - 2
        n_bars = min(n_bars, room) if room >= len(_HISTOGRAM) else 0
    header = "".join(f"{c.name:>{c.width}}" for c in columns)
    lines = [_header(header + (f"  {_HISTOGRAM}" if n_bars else ""))]
    for head in report.heads:
        line = _name(head, head.role)
        for column in columns:
            text, excess = _cell(head, column.field, report.baseline_of(head))
            line.append(f"{text:>{column.width}}", _BOLD if excess > ROLE_THRESHOLD else None)
        line.append(f"  {_bars(head.distance_histogram, n_bars)}" if n_bars else "")
        lines.append(line)
    baselines = {"uniform": report.baseline, "uniform, window": report.window_baseline}
    for name, baseline in baselines.items():
        if baseline is not None:
            uniform = (_number(c.field, baseline.get(c.field)) for c in columns)
            cells = "".join(f"{text:>{c.width}}" for c, text in zip(columns, uniform, strict=True))
            lines.append(Text(f"{name:{_NAME_COLUMNS}}{cells}", _DIM, no_wrap=True))
    names = [column.name for column in columns] + [_HISTOGRAM] * bool(n_bars)
    notes = ["; ".join(f"{name}: {COLUMN_MEANINGS[name]}" for name in names)]
    notes += head_notes(report)
    if report.loss is None:
        notes.append("attention is not proof of influence; --ablate zero measures it")
    notes += _dropped(available, columns, [] if n_bars else [_HISTOGRAM])
    return [*lines, *(Text(note, _DIM) for note in notes)]


def head_notes(report: HeadsReport) -> list[str]:
    """Return notes about the text that the metrics were measured on."""
    notes = [f"means over all queries after the first ({report.n_queries})"]
    windows = {head.layer: head.window for head in report.heads if head.window is not None}
    if windows:
        size = f"sliding window of {count(max(windows.values()), 'token')}"
        notes.append(f"{name_layers(windows)}: {size}")
    if not report.block_length:
        small = "the context, a sliding window or the vocabulary is too small"
        notes.append(f"duplicate, induction: not measured; {small}")
    else:
        gain = report.repeat_gain or 0.0
        other = "the same tokens in another order" if report.same_tokens else "different tokens"
        notes.append(
            f"duplicate, induction: measured in {report.n_seeds} random texts of "
            f"{report.block_length} tokens that repeat, sampled from {report.sampled_from}; "
            f"control: the same positions where {other} follow. The repetition costs "
            f"{abs(gain):.2f} nats/token {'less' if gain >= 0 else 'more'} than the control"
        )
    if all(head.text_induction is None for head in report.heads):
        notes.append("text: not measured; no token repeats")
    if report.loss is not None:
        notes.append(f"Δloss: the loss with all heads is {report.loss:.3f} nats/token")
    return notes


def comparison_table(
    first: HeadsReport, second: HeadsReport, shifts: Sequence[float], *, width: int | None
) -> list[Text]:
    """Return the second model's metrics with their differences from the first's.

    `shifts`: per head, the share of attention that moved to another distance.
    """
    ablated = first.loss is not None and second.loss is not None
    available = [c for c in _COLUMNS if c.compare_width and (c.field != "ablation_cost" or ablated)]
    columns = _fit(available, [c.compare_width for c in available], width)
    lines = [_header("".join(f"{c.name:>{c.compare_width}}" for c in columns))]
    for a, b in zip(first.heads, second.heads, strict=True):
        line = _name(b, b.role if a.role == b.role else f"→ {b.role or 'none'}")
        for column in columns:
            text, change = _change(column.field, *(getattr(h, column.field) for h in (a, b)))
            style = _BOLD if change > ROLE_THRESHOLD else None
            line.append(f"{text:>{column.compare_width}}", style)
        lines.append(line)
    largest = sorted(zip(shifts, second.heads, strict=True), key=lambda pair: -pair[0])
    shifted = ", ".join(f"{h.layer}.{h.head} ({x:.0%})" for x, h in largest[:_MAX_SHIFTS])
    notes = [
        "values of the second model, each with its difference from the first; →: role changed",
        f"largest shifts (share of attention that moved to another distance): {shifted}",
        *_dropped(available, columns),
    ]
    return [*lines, *(Text(note, _DIM) for note in notes)]


def _fit(columns: Sequence[_Column], widths: Sequence[int], width: int | None) -> Sequence[_Column]:
    """Return the first columns that fit beside the names."""
    ends = [_NAME_COLUMNS + end for end in accumulate(widths)]
    return [c for c, end in zip(columns, ends, strict=True) if width is None or end <= width]


def _dropped(
    available: Sequence[_Column], columns: Sequence[_Column], more: Sequence[str] = ()
) -> list[str]:
    names = ", ".join([*(column.name for column in available[len(columns) :]), *more])
    return [f"not shown at this width: {names}; --json and --csv have them"] if names else []


def _header(names: str) -> Text:
    return Text(f"{'head':6}{'role':{_NAME_COLUMNS - 6}}{names}", _BOLD, no_wrap=True)


def _name(head: HeadReport, role: str) -> Text:
    return Text(f"{f'{head.layer}.{head.head}':6}{role:{_NAME_COLUMNS - 6}}", no_wrap=True)


def _cell(head: HeadReport, field: str, baseline: dict[str, float]) -> tuple[str, float]:
    """Return a cell's text, and how far its score exceeds the control or the baseline."""
    value, control = getattr(head, field), getattr(head, f"{field}_control", None)
    if value is None or field in _NUMBERS or field == "ablation_cost":
        return _number(field, value), 0
    if control is None:
        return _number(field, value), value - baseline.get(field, 0)
    return f"{value:.2f}/{control:.2f}".replace("0.", "."), value - control


def _number(field: str, value: float | None) -> str:
    if value is None:
        return "" if field == "ablation_cost" else "–"
    if field in _NUMBERS:
        return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
    return f"{value:z.2f}" if field != "ablation_cost" else f"{value:+z.3f}"


def _change(field: str, a: float | None, b: float | None) -> tuple[str, float]:
    """Return the second value with its difference, and that of scores as a number."""
    if a is None or b is None:
        return "–", 0
    digits = 2 if field not in _NUMBERS else 1 if max(a, b) < 99.95 else 0
    digits = 3 if field == "ablation_cost" else digits
    is_share = field not in (*_NUMBERS, "ablation_cost")
    return f"{b:z.{digits}f} {b - a:+z.{digits}f}", abs(b - a) if is_share else 0


def _bars(shares: Sequence[float], n: int) -> str:
    """Return n bars; the last one stands for all remaining distances."""
    shown = [*shares[: n - 1], sum(shares[n - 1 :])]
    return "".join(_BARS[min(7, int(share * 8))] for share in shown)
