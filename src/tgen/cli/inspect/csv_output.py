"""`--csv`: reports as rows. Floats have nine digits, which restore any float32 exactly."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from tgen.cli.render.token_labels import label
from tgen.reports.inspection import (
    AttentionReport,
    AttributionReport,
    HeadReport,
    HeadsReport,
    LensReport,
    PositionsReport,
    Prediction,
    RolloutReport,
    TextReport,
    TokenReport,
)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    r"""Return rows as CSV (RFC 4180, but with \n line ends)."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bytes):
        return label(value)
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else value


def csv_rows(
    report: Any, ids: Sequence[int], tokens: Sequence[bytes]
) -> Iterator[Sequence[object]]:
    """Yield the header and the rows of one view's report."""
    if isinstance(report, HeadsReport):
        names = [one.name for one in fields(HeadReport) if one.name != "distance_histogram"]
        yield names
        for head in report.heads:
            yield [getattr(head, name) for name in names]
    elif isinstance(report, TextReport):
        names = [one.name for one in fields(TokenReport)]
        yield names
        for token in report.tokens:
            yield [getattr(token, name) for name in names]
    elif isinstance(report, AttributionReport):
        yield "component", "layer", "head", "logit"
        for part in report.contributions:
            yield part.component, part.layer, part.head, part.logit
    elif isinstance(report, LensReport):
        yield "layer", "position", "id", "token", "probability"
        for name, layer_ids, texts, probabilities in zip(
            report.layers, report.top_ids, report.top_texts, report.top_probabilities, strict=True
        ):
            for j, (i, text) in enumerate(zip(layer_ids, texts, strict=True)):
                yield name, report.first + j, i, text, float(probabilities[j])
    elif isinstance(report[0], Prediction):
        yield "id", "token", "probability", "logit"
        for candidate in report:
            yield candidate.id, candidate.text, candidate.probability, candidate.logit
    elif isinstance(report[0], PositionsReport):
        yield "kind", report[0].row_name, report[0].column_name, "value"
        for encoding in report:
            for i, values in enumerate(encoding.values.tolist()):
                for j, value in enumerate(values):
                    yield encoding.kind, i, j, value
    else:
        yield from _attention_rows(report, ids, tokens)


def _attention_rows(
    reports: Sequence[AttentionReport | RolloutReport], ids: Sequence[int], tokens: Sequence[bytes]
) -> Iterator[Sequence[object]]:
    """Yield one row per weight up to the diagonal."""
    numbers = ("layer", "head", "query", "key", "query_id", "key_id")
    yield *numbers, "query_token", "key_token", "weight"
    names = [label(token) for token in tokens]
    for one in reports:
        head = one.head if isinstance(one, AttentionReport) and one.head is not None else "mean"
        for i, values in enumerate(one.weights.tolist()):
            for j, value in enumerate(values[: i + 1]):
                yield one.layer, head, i, j, ids[i], ids[j], names[i], names[j], value
