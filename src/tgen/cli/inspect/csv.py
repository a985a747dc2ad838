"""Reports as rows of CSV. Numbers have nine digits: as many as float32 needs to come back."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tgen.cli.render.token_labels import label
from tgen.reports import (
    AttentionReport,
    HeadsReport,
    LensReport,
    PositionsReport,
    Prediction,
    RolloutReport,
    TextReport,
    WhyReport,
)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """A header and rows, as RFC 4180 has them but for the line ends."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_plain(value) for value in row] for row in rows)
    return out.getvalue()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return label(value)
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else value


def csv_rows(
    report: Any, ids: Sequence[int], tokens: Sequence[bytes]
) -> Iterator[Sequence[object]]:
    """The rows of one view's report, the header first."""
    if isinstance(report, HeadsReport):
        names = [name for name in asdict(report.heads[0]) if name != "by_distance"]
        yield names
        for head in report.heads:
            yield [getattr(head, name) for name in names]
    elif isinstance(report, TextReport):
        yield list(asdict(report.tokens[0]))
        for token in report.tokens:
            yield list(asdict(token).values())
    elif isinstance(report, WhyReport):
        yield "part", "layer", "head", "logit"
        for part in report.parts:
            yield part.part, part.layer, part.head, part.logit
    elif isinstance(report, LensReport):
        yield "layer", "position", "id", "token", "probability"
        for name, ids, texts, chances in zip(
            report.layers, report.likeliest, report.likeliest_text, report.probabilities,
            strict=True,
        ):  # fmt: skip
            for j, (i, text) in enumerate(zip(ids, texts, strict=True)):
                yield name, report.first + j, i, text, float(chances[j])
    elif isinstance(report[0], Prediction):
        yield "id", "token", "probability", "logit"
        for candidate in report:
            yield candidate.id, candidate.text, candidate.probability, candidate.logit
    elif isinstance(report[0], PositionsReport):
        yield "kind", report[0].row_name, report[0].column_name, "value"
        for one in report:
            for i, values in enumerate(one.values.tolist()):
                for j, value in enumerate(values):
                    yield one.kind, i, j, value
    else:
        yield from _matrices(report, ids, tokens)


def _matrices(
    reports: Sequence[AttentionReport | RolloutReport], ids: Sequence[int], tokens: Sequence[bytes]
) -> Iterator[Sequence[object]]:
    """The lower triangles, a row a weight."""
    numbers = ("layer", "head", "query", "key", "query_id", "key_id")
    yield *numbers, "query_token", "key_token", "weight"
    names = [label(token) for token in tokens]
    for one in reports:
        head = one.head if isinstance(one, AttentionReport) and one.head is not None else "mean"
        for i, values in enumerate(one.weights.tolist()):
            for j, value in enumerate(values[: i + 1]):
                yield one.layer, head, i, j, ids[i], ids[j], names[i], names[j], value
