"""Tables of next-token predictions, the logit lens and logit attribution."""

from collections.abc import Sequence

from rich.cells import set_cell_size
from rich.table import Table
from rich.text import Text

from tgen.cli.render.colormap import highlight
from tgen.cli.render.tables import table
from tgen.cli.render.token_labels import cut, label
from tgen.reports.inspection import AttributionReport, LensReport, Prediction

_MAX_BAR = 30  # columns of the longest bar
_TEXT_COLUMNS = 50  # columns left of the bars
_LAYER_COLUMNS = 10
_MIN_CELL, _MAX_CELL = 9, 18  # columns per position


def prediction_table(predictions: Sequence[Prediction], *, context: str, width: int) -> Table:
    """Return the candidates for the next token, with a bar per probability."""
    rows = table("token", ">id", ">probability", ">logit", "", title=f"next token after {context}")
    for candidate in predictions:
        rows.add_row(
            Text(label(candidate.text, width=20)),
            str(candidate.id),
            f"{candidate.probability:.1%}",
            f"{candidate.logit:.2f}",
            "█" * round(candidate.probability * _bar_columns(width)),
        )
    return rows


def _bar_columns(width: int) -> int:
    return min(max(width - _TEXT_COLUMNS, 0), _MAX_BAR)


def lens_table(report: LensReport, tokens: Sequence[bytes], *, width: int) -> list[Table | Text]:
    """Return the top predictions by layer at the last positions that fit, then the candidates of
    the query by layer."""
    n = len(report.top_ids[0])
    room = max(width - _LAYER_COLUMNS, _MIN_CELL)
    visible = range(max(0, n - room // _MIN_CELL), n)
    cell = min(room // len(visible), _MAX_CELL)
    header = Text(" " * _LAYER_COLUMNS, no_wrap=True)
    for j in visible:
        header.append(_cell(f"{report.first + j} {label(tokens[report.first + j])}", cell), "bold")
    lines = [Text("logit lens: the most likely next token after each layer"), header]
    for name, texts, probabilities in zip(
        report.layers, report.top_texts, report.top_probabilities, strict=True
    ):
        line = Text(f"{name:{_LAYER_COLUMNS}}"[:_LAYER_COLUMNS], no_wrap=True)
        for j in visible:
            text = f"{label(texts[j], width=cell - 5)} {probabilities[j] * 100:.0f}"
            line.append(_cell(text, cell), highlight(float(probabilities[j]) ** 0.5))
        lines.append(line)
    lines.append(Text("numbers: probability in percent", style="dim"))
    if len(visible) < n:
        last = report.first + n - 1
        note = f"positions {report.first + visible.start} to {last}; --query selects others"
        lines.append(Text(note, style="dim"))
    answer, query = label(report.answer_text, width=16), report.query
    title = f"after {query} {label(tokens[query], width=16)}: final prediction {answer}"
    rows = table("layer", ">rank", ">probability", "candidates", title=title)
    for name, rank, probability, candidates in zip(
        report.layers,
        report.answer_ranks,
        report.answer_probabilities,
        report.candidates,
        strict=True,
    ):
        texts_of_layer = (f"{label(c.text, width=10)} {c.probability:.0%}" for c in candidates)
        rows.add_row(name, f"{rank:,}", f"{probability:.1%}", Text("  ".join(texts_of_layer)))
    note = "rank and probability: those of the final prediction"
    return [*lines, Text(), rows, Text(note, style="dim")]


def _cell(text: str, columns: int) -> str:
    return set_cell_size(cut(text, columns - 1), columns)


def attribution_table(
    report: AttributionReport, token: bytes, *, top: int, width: int
) -> list[Table | Text]:
    """Return the largest contributions to a logit, and the sum of the others."""
    title = (
        f"logit of {label(report.target_text, width=16)} after {report.query} "
        f"{label(token, width=16)}: {report.logit:.2f} (probability {report.probability:.1%})"
    )
    rows = table("component", ">contribution", "", title=title)
    largest = max((abs(part.logit) for part in report.contributions), default=1.0) or 1.0
    for part in report.contributions[:top]:
        length = round(abs(part.logit) / largest * _bar_columns(width))
        bar = ("█" if part.logit >= 0 else "░") * length
        rows.add_row(part.component, f"{part.logit:+z.2f}", bar)
    others = report.contributions[top:]
    if others:
        name = f"{len(others)} other{'s' * (len(others) > 1)}"
        rows.add_row(name, f"{sum(part.logit for part in others):+z.2f}", "", style="dim")
    norms = "the final norm's scale is"
    if report.normalizes_outputs:
        norms = "the scales of the final norm and of the norms on outputs are"
    note = (
        f"all {len(report.contributions)} contributions sum to the logit (error "
        f"{report.difference:.0e}); {norms} held constant"
    )
    return [rows, Text(note, style="dim")]
