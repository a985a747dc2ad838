"""What every head does, a row a head; or what changed in them from one model to another.

Columns have widths of their own: a table that fits itself to a terminal would cut numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.style import Style
from rich.text import Text

from tgen.reports import CLEAR, HeadReport, HeadsReport

_BARS = "▁▂▃▄▅▆▇█"
_NAME = 16  # columns of a head and its role
_FAR = "near>far"
_MOST_CHANGED = 5
_BOLD, _FAINT = Style(bold=True), Style(dim=True)


@dataclass(frozen=True)
class _Column:
    name: str
    field: str  # of HeadReport
    width: int
    compared: int  # its width with a change behind it
    meaning: str = ""


# What does not fit is left out from the end.
_COLUMNS = (
    _Column("cost", "ablation", 8, 14),
    _Column("keys", "effective_keys", 5, 11, "how many tokens it looks at, exp(entropy)"),
    _Column("back", "distance", 5, 11, "how many tokens back"),
    _Column("self", "self", 5, 11, "the weight on the token itself"),
    _Column("prev", "previous", 5, 11, "on the one before"),
    _Column("first", "first", 6, 11, "on the text's first, whose own row counts for it too"),
    _Column("dup", "duplicate", 9, 11),
    _Column("induction", "induction", 10, 11),
    _Column("text", "text_induction", 5, 11),
)
_COMPARED = ("cost", "keys", "prev", "first", "dup", "induction")
_NUMBERS = ("effective_keys", "distance")  # the other fields are shares, but for the cost


def heads_view(report: HeadsReport, *, width: int | None) -> list[Text]:
    """The heads, what uniform attention would score, and what the columns mean.

    The columns that fit into `width` are shown, and the others named; None: all are.
    """
    asked = [c for c in _COLUMNS if c.field != "ablation" or report.loss is not None]
    shown = _fitting(asked, [c.width for c in asked], width)
    bars = len(report.heads[0].by_distance)
    if width is not None:
        room = width - _NAME - sum(c.width for c in shown) - 2
        bars = min(bars, room) if room >= len(_FAR) else 0
    names = "".join(f"{c.name:>{c.width}}" for c in shown)
    lines = [_header(names + (f"  {_FAR}" if bars else ""))]
    for head in report.heads:
        line = _name(head, head.role)
        for column in shown:
            text, strength = _cell(head, column.field, report.baseline)
            line.append(f"{text:>{column.width}}", _BOLD if strength > CLEAR else None)
        line.append(f"  {_bars(head.by_distance, bars)}" if bars else "")
        lines.append(line)
    uniform = (_number(c.field, report.baseline.get(c.field)) for c in shown)
    cells = "".join(f"{text:>{c.width}}" for c, text in zip(shown, uniform, strict=True))
    lines.append(Text(f"{'uniform':{_NAME}}{cells}", _FAINT, no_wrap=True))
    left_out = _left_out(asked, shown, [] if bars else [_FAR])
    said = [*_explained(report, shown, bars=bars > 0), *left_out]
    return [*lines, *(Text(line, _FAINT) for line in said)]


def compare_view(
    first: HeadsReport, second: HeadsReport, moved: Sequence[float], *, width: int | None
) -> list[Text]:
    """The second model's heads, and behind each number how far it is from the first's; `moved` is
    the share of each head's attention that went nearer or farther."""
    ablated = first.loss is not None and second.loss is not None
    asked = [c for c in _COLUMNS if c.name in _COMPARED and (c.name != "cost" or ablated)]
    shown = _fitting(asked, [c.compared for c in asked], width)
    lines = [_header("".join(f"{c.name:>{c.compared}}" for c in shown))]
    for a, b in zip(first.heads, second.heads, strict=True):
        line = _name(b, b.role if a.role == b.role else f"→ {b.role or 'none'}")
        for column in shown:
            text, strength = _change(column.field, *(getattr(h, column.field) for h in (a, b)))
            line.append(f"{text:>{column.compared}}", _BOLD if strength > CLEAR else None)
        lines.append(line)
    most = sorted(zip(moved, second.heads, strict=True), key=lambda pair: -pair[0])
    named = ", ".join(f"{h.layer}.{h.head} ({share:.0%})" for share, h in most[:_MOST_CHANGED])
    said = [
        "the second model's numbers, each with its distance from the first's; → a role that is new",
        f"most changed, by the share of attention that moved nearer or farther: {named}",
        *_left_out(asked, shown),
    ]
    return [*lines, *(Text(line, _FAINT) for line in said)]


def _fitting(
    columns: Sequence[_Column], widths: Sequence[int], width: int | None
) -> Sequence[_Column]:
    """As many columns from the first on as fit beside the names."""
    ends = [_NAME + end for end in accumulate(widths)]
    return [c for c, end in zip(columns, ends, strict=True) if width is None or end <= width]


def _left_out(
    asked: Sequence[_Column], shown: Sequence[_Column], more: Sequence[str] = ()
) -> list[str]:
    names = ", ".join([*(column.name for column in asked[len(shown) :]), *more])
    return [f"not shown at this width: {names}; --json and --csv have them"] if names else []


def _header(names: str) -> Text:
    return Text(f"{'head':6}{'role':{_NAME - 6}}{names}", _BOLD, no_wrap=True)


def _name(head: HeadReport, role: str) -> Text:
    return Text(f"{f'{head.layer}.{head.head}':6}{role:{_NAME - 6}}", no_wrap=True)


def _cell(head: HeadReport, field: str, baseline: dict[str, float]) -> tuple[str, float]:
    """What is written, and how far it is above what would be there anyway."""
    value, control = getattr(head, field), getattr(head, f"{field}_control", None)
    if value is None or field in _NUMBERS or field == "ablation":
        return _number(field, value), 0
    if control is None:
        return _number(field, value), value - baseline.get(field, 0)
    return f"{value:.2f}/{control:.2f}".replace("0.", "."), value - control


def _number(field: str, value: float | None) -> str:
    if value is None:
        return "" if field == "ablation" else "–"
    if field in _NUMBERS:
        return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
    return f"{value:z.2f}" if field != "ablation" else f"{value:+z.3f}"


def _change(field: str, a: float | None, b: float | None) -> tuple[str, float]:
    if a is None or b is None:
        return "–", 0
    digits = 2 if field not in _NUMBERS else 1 if max(a, b) < 99.95 else 0
    digits = 3 if field == "ablation" else digits
    is_share = field not in (*_NUMBERS, "ablation")
    return f"{b:z.{digits}f} {b - a:+z.{digits}f}", abs(b - a) if is_share else 0


def _bars(shares: Sequence[float], n: int) -> str:
    """A bar a distance; the last holds all that there is no room for."""
    shown = [*shares[: n - 1], sum(shares[n - 1 :])]
    return "".join(_BARS[min(7, int(share * 8))] for share in shown)


def _explained(report: HeadsReport, shown: Sequence[_Column], *, bars: bool) -> list[str]:
    names = [column.name for column in shown]
    meanings = "; ".join(f"{c.name}: {c.meaning}" for c in shown if c.meaning)
    lines = [f"means over the {report.n_rows} tokens after the first. {meanings}"]
    if bars:
        lines[0] += f"; {_FAR}: its weight 0, 1, 2-3, 4-7, ... tokens back"
    if not report.block_length:
        lines.append("dup, induction: the context or the vocabulary is too small for them")
    elif "dup" in names:
        gain = report.repeat_gain or 0.0
        other = "the same ones come in another order" if report.same_tokens else "others come"
        lines.append(
            f"dup, induction: weight on a token's earlier copy, and on what followed it, in "
            f"{report.seeds} x {report.block_length} random tokens that come twice / the control: "
            f"the same places where {other}. They are drawn from {report.drawn_from}; the second "
            f"time costs {abs(gain):.2f} nats a token {'less' if gain >= 0 else 'more'} than the "
            "control"
        )
    if "text" in names:
        lines.append("text: the weight on what followed the same token earlier in this text")
    if report.loss is None:
        lines.append("attention is not proof of influence: --ablate zero shows what each is worth")
    else:
        lines.append(f"cost: nats a token more without the head; with all {report.loss:.3f}")
    return lines
