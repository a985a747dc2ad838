"""What every head does, a row a head; or what changed in them from one model to another.

Columns have widths of their own: a table that fits itself to a terminal would cut numbers.
"""

from rich.style import Style
from rich.text import Text

from tgen.reports import HeadReport, HeadsReport

_BARS = "▁▂▃▄▅▆▇█"
_SHARES = {"self": 5, "previous": 5, "first": 6}  # columns
_TWICE = {"duplicate": 8, "induction": 10}  # columns of a score and its control
_CLEAR = 0.3  # scores above it are set in bold
_MOST_CHANGED = 5
_BOLD, _FAINT = Style(bold=True), Style(dim=True)


def heads_view(report: HeadsReport) -> list[Text]:
    """The heads, what uniform attention would score, and what the columns mean."""
    names = {"keys": 6, "back": 6, "self": 5, "prev": 5, "first": 6, "dup": 8}
    names |= {"induction": 10} | ({"cost": 8} if report.loss is not None else {})
    lines = [_header(names, "  near>far")]
    for head in report.heads:
        line = _name(head, head.role)
        line.append(f"{_one(head.effective_keys):>6}{_one(head.distance):>6}")
        for name, width in _SHARES.items():
            _append(line, f"{getattr(head, name):{width}.2f}", getattr(head, name))
        for name, width in _TWICE.items():
            score, control = getattr(head, name), getattr(head, f"{name}_control")
            shown = "–" if score is None else f"{score:.2f}/{control:.2f}".replace("0.", ".")
            _append(line, f"{shown:>{width}}", 0 if score is None else score - control)
        if head.ablation is not None:
            line.append(f"{head.ablation:+8.3f}")
        line.append(f"  {_bars(head)}")
        lines.append(line)
    uniform = report.baseline
    shares = "".join(f"{uniform[name]:{w}.2f}" for name, w in _SHARES.items())
    twice = "".join(f"{uniform[name]:{w}.2f}" for name, w in _TWICE.items() if name in uniform)
    numbers = f"{_one(uniform['effective_keys']):>6}{_one(uniform['distance']):>6}{shares}{twice}"
    lines.append(Text(f"{'uniform':16}{numbers}", _FAINT, no_wrap=True))
    return [*lines, *(Text(line, _FAINT) for line in _explained(report))]


def compare_view(first: HeadsReport, second: HeadsReport) -> list[Text]:
    """The second model's heads, and behind each number how far it is from the first's."""
    ablated = first.loss is not None and second.loss is not None
    names = ["keys", "prev", "first", "dup", "induction", *(["cost"] if ablated else [])]
    lines, moved = [_header(dict.fromkeys(names, 11))], []
    for a, b in zip(first.heads, second.heads, strict=True):
        line = _name(b, b.role if a.role == b.role else f"→ {b.role or 'none'}")
        line.append(_change(a.effective_keys, b.effective_keys, 1))
        for name in ("previous", "first", "duplicate", "induction"):
            old, new = getattr(a, name), getattr(b, name)
            _append(line, _change(old, new), 0 if old is None or new is None else abs(new - old))
        if ablated:
            line.append(_change(a.ablation, b.ablation, 3))
        lines.append(line)
        share = sum(abs(x - y) for x, y in zip(a.by_distance, b.by_distance, strict=True)) / 2
        moved.append((share, f"{b.layer}.{b.head} ({share:.0%})"))
    most = ", ".join(name for _, name in sorted(moved, reverse=True)[:_MOST_CHANGED])
    said = [
        "the second model's numbers, each with its distance from the first's; → a role that is new",
        f"most changed, by the share of attention that moved nearer or farther: {most}",
    ]
    return [*lines, *(Text(line, _FAINT) for line in said)]


def _header(columns: dict[str, int], after: str = "") -> Text:
    words = "".join(f"{name:>{width}}" for name, width in columns.items())
    return Text(f"head  {'role':10}{words}{after}", _BOLD, no_wrap=True)


def _name(head: HeadReport, role: str) -> Text:
    return Text(f"{f'{head.layer}.{head.head}':6}{role:10}", no_wrap=True)


def _append(line: Text, shown: str, strength: float) -> None:
    line.append(shown, _BOLD if strength > _CLEAR else None)


def _bars(head: HeadReport) -> str:
    return "".join(_BARS[min(7, int(share * 8))] for share in head.by_distance)


def _change(a: float | None, b: float | None, digits: int = 2) -> str:
    if a is None or b is None:
        return f"{'–':>11}"
    digits = 0 if digits == 1 and abs(b) >= 100 else digits
    return f"{f'{b:.{digits}f} {b - a:+.{digits}f}':>11}"


def _one(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _explained(report: HeadsReport) -> list[str]:
    lines = [
        f"means over {report.n_rows} queries (the first sees only itself, and counts for `first` "
        "alone). keys: how many it looks at, exp(entropy); back: how many tokens; self, prev, "
        "first: the weight there; near>far: its weight 0, 1, 2-3, 4-7, ... tokens back",
    ]
    if report.block_length:
        gain = report.repeat_gain or 0.0
        lines.append(
            f"dup, induction: weight on a token's earlier copy, and on what followed it, in "
            f"{report.seeds} x {report.block_length} random tokens that come twice / the same "
            f"places where others follow. The second time costs {abs(gain):.2f} nats a token "
            f"{'less' if gain >= 0 else 'more'}"
        )
    else:
        lines.append("dup, induction: the context or the vocabulary is too small for them")
    if report.loss is None:
        lines.append("attention is not proof of influence: --ablate zero shows what each is worth")
    else:
        lines.append(f"cost: nats a token more without the head; with all {report.loss:.3f}")
    return lines


def same_heads(first: HeadsReport, second: HeadsReport) -> bool:
    """Whether both have as many layers and heads."""
    places = [[(head.layer, head.head) for head in report.heads] for report in (first, second)]
    return places[0] == places[1]
