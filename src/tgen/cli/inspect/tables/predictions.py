"""What the model expects next, after every layer, and why."""

from collections.abc import Sequence

from rich.cells import set_cell_size
from rich.table import Table
from rich.text import Text

from tgen.cli.render.colormap import highlight
from tgen.cli.render.tables import table
from tgen.cli.render.token_labels import cut, label
from tgen.reports import LensReport, Prediction, WhyReport

_BAR = 30  # columns of a whole bar, where there is room
_WORDS = 50  # columns that come before bars
_LAYER = 10  # columns of a layer's name
_CELL, _WIDEST = 9, 18  # columns of a position at least, and at most


def prediction_table(predictions: Sequence[Prediction], *, after: str, width: int) -> Table:
    """The candidates for the next token, a bar for each probability."""
    rows = table("token", ">id", ">probability", ">logit", "", title=f"after {after}")
    for candidate in predictions:
        rows.add_row(
            Text(label(candidate.text, width=20)),
            str(candidate.id),
            f"{candidate.probability:.1%}",
            f"{candidate.logit:.2f}",
            "█" * round(candidate.probability * _bar(width)),
        )
    return rows


def _bar(width: int) -> int:
    """Columns of a whole bar beside the words."""
    return min(max(width - _WORDS, 0), _BAR)


def lens_view(report: LensReport, tokens: Sequence[bytes], *, width: int) -> list[Table | Text]:
    """The first choices by layer at the last positions that fit, then the query's candidates."""
    n = len(report.likeliest[0])
    room = max(width - _LAYER, _CELL)
    shown = range(max(0, n - room // _CELL), n)
    cell = min(room // len(shown), _WIDEST)
    head = Text(" " * _LAYER, no_wrap=True)
    for j in shown:
        head.append(_cell(f"{report.first + j} {label(tokens[report.first + j])}", cell), "bold")
    lines = [Text("what the model would say next if it stopped after each layer"), head]
    for name, texts, chances in zip(
        report.layers, report.likeliest_text, report.probabilities, strict=True
    ):
        line = Text(f"{name:{_LAYER}}"[:_LAYER], no_wrap=True)
        for j in shown:
            choice = _cell(f"{label(texts[j], width=cell - 5)} {chances[j] * 100:.0f}", cell)
            line.append(choice, highlight(float(chances[j]) ** 0.5))
        lines.append(line)
    lines.append(Text("percent is the first choice's probability", style="dim"))
    if len(shown) < n:
        last = report.first + n - 1
        said = f"positions {report.first + shown.start} to {last}; --query chooses others"
        lines.append(Text(said, style="dim"))
    return [*lines, Text(), _layers(report, tokens)]


def _layers(report: LensReport, tokens: Sequence[bytes]) -> Table:
    answer = label(report.answer_text, width=16)
    after = f"after {report.query} {label(tokens[report.query], width=16)}: the answer is {answer}"
    rows = table("layer", ">its rank", ">p", "first choices", title=after)
    for name, rank, chance, candidates in zip(
        report.layers, report.ranks, report.answer_probabilities, report.candidates, strict=True
    ):
        choices = "  ".join(f"{label(c.text, width=10)} {c.probability:.0%}" for c in candidates)
        rows.add_row(name, f"{rank:,}", f"{chance:.1%}", Text(choices))
    return rows


def _cell(text: str, columns: int) -> str:
    """Text in the columns of one position, and a space."""
    return set_cell_size(cut(text, columns - 1), columns)


def why_view(report: WhyReport, token: bytes, *, top: int, width: int) -> list[Table | Text]:
    """The largest parts of a logit, and that all of them are it."""
    title = (
        f"why {label(report.target_text, width=16)} after {report.query} "
        f"{label(token, width=16)}: logit {report.logit:.2f}, probability {report.probability:.1%}"
    )
    rows = table("part", ">adds", "", title=title)
    largest = max((abs(part.logit) for part in report.parts), default=1.0) or 1.0
    for part in report.parts[:top]:
        bar = ("█" if part.logit >= 0 else "░") * round(abs(part.logit) / largest * _bar(width))
        rows.add_row(part.part, f"{part.logit:+z.2f}", bar)
    others = report.parts[top:]
    if others:
        count = f"{len(others)} other{'s' * (len(others) > 1)}"
        rows.add_row(count, f"{sum(part.logit for part in others):+z.2f}", "", style="dim")
    said = (
        f"all {len(report.parts)} parts sum to the logit within {report.difference:.0e}; "
        "the final norm's scale is held as it is"
    )
    return [rows, Text(said, style="dim")]
