"""What the model expects next, after every layer, and why."""

from collections.abc import Sequence

from rich.cells import set_cell_size
from rich.table import Table
from rich.text import Text

from tgen.cli.views.colours import glow
from tgen.cli.views.labels import cut, label
from tgen.reports import LensReport, Prediction, WhyReport

_BAR = 30  # characters of a whole probability
_LAYER = 10  # columns of a layer's name
_CELL = 9  # columns of a position


def prediction_table(predictions: Sequence[Prediction], *, after: str) -> Table:
    """The candidates for the next token, a bar for each probability."""
    table = Table(
        title=Text(f"after {after}"),
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
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
            "█" * round(candidate.probability * _BAR),
        )
    return table


def lens_view(report: LensReport, tokens: Sequence[bytes], *, width: int) -> list[Table | Text]:
    """The first choices by layer at the last positions that fit, then the query's candidates."""
    n = len(report.likeliest[0])
    shown = range(max(0, n - (width - _LAYER) // _CELL), n)
    head = Text(" " * _LAYER, no_wrap=True)
    for j in shown:
        head.append(_cell(f"{report.first + j} {label(tokens[report.first + j])}"), "bold")
    lines = [Text("what the model would say next if it stopped after each layer"), head]
    for name, texts, chances in zip(
        report.layers, report.likeliest_text, report.probabilities, strict=True
    ):
        line = Text(f"{name:{_LAYER}}"[:_LAYER], no_wrap=True)
        for j in shown:
            choice = _cell(f"{label(texts[j], width=_CELL - 5)} {chances[j] * 100:.0f}")
            line.append(choice, glow(float(chances[j]) ** 0.5))
        lines.append(line)
    lines.append(Text("percent is the first choice's probability", style="dim"))
    if len(shown) < n:
        last = report.first + n - 1
        said = f"positions {report.first + shown.start} to {last}; --query chooses others"
        lines.append(Text(said, style="dim"))
    return [*lines, Text(), _layers(report, tokens)]


def _layers(report: LensReport, tokens: Sequence[bytes]) -> Table:
    answer = label(report.answer_text, width=16)
    table = Table(
        title=Text(
            f"after {report.query} {label(tokens[report.query], width=16)}: the answer is {answer}"
        ),
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("layer")
    table.add_column("answer's rank", justify="right")
    table.add_column("p", justify="right")
    table.add_column("first choices")
    for name, rank, chance, candidates in zip(
        report.layers, report.ranks, report.answer_probabilities, report.candidates, strict=True
    ):
        choices = "  ".join(f"{label(c.text, width=10)} {c.probability:.0%}" for c in candidates)
        table.add_row(name, f"{rank:,}", f"{chance:.1%}", Text(choices))
    return table


def _cell(text: str) -> str:
    """Text in the columns of one position, and a space."""
    return set_cell_size(cut(text, _CELL - 1), _CELL)


def why_view(report: WhyReport, token: bytes, *, top: int) -> list[Table | Text]:
    """The largest parts of a logit, and that all of them are it."""
    table = Table(
        title=Text(
            f"why {label(report.target_text, width=16)} after {report.query} "
            f"{label(token, width=16)}: logit {report.logit:.2f}, probability "
            f"{report.probability:.1%}"
        ),
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("part")
    table.add_column("adds", justify="right")
    table.add_column("")
    largest = max((abs(part.logit) for part in report.parts), default=1.0) or 1.0
    for part in report.parts[:top]:
        bar = ("█" if part.logit >= 0 else "░") * round(abs(part.logit) / largest * _BAR)
        table.add_row(part.part, f"{part.logit:+.2f}", bar)
    rest = sum(part.logit for part in report.parts[top:])
    if len(report.parts) > top:
        table.add_row(f"{len(report.parts) - top} others", f"{rest:+.2f}", "", style="dim")
    said = (
        f"all {len(report.parts)} parts sum to the logit within {report.difference:.0e}; "
        "the final norm's scale is held as it is"
    )
    return [table, Text(said, style="dim")]
