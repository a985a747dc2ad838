"""The output of `tgen inspect`: tables, one JSON object, or files.

Floats in CSV files have nine digits, which restore any float32 exactly.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from rich.text import Text

from tgen.cli import console
from tgen.cli.inspect.command import VIEWS_WITHOUT_TEXT, InspectOptions, View
from tgen.cli.inspect.training_curves import training_lines
from tgen.cli.inspect.views import Screen, draw_view, heat_maps, make_report
from tgen.cli.rich_console import out
from tgen.drawing.head_tables import comparison_table
from tgen.drawing.tables import checks_footer
from tgen.drawing.terminal_text import label, to_json
from tgen.errors import TgenError, UsageError
from tgen.inspection.heads import attention_shift
from tgen.inspection.inspector import Inspector
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
from tgen.reports.json_text import json_text, json_value
from tgen.runs import log
from tgen.storage import files
from tgen.version import __version__

_SCHEMA = "tgen.inspect/3"


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


def print_tables(inspector: Inspector, options: InspectOptions) -> None:
    """Print all views, and the result of the self-checks.

    All are computed before the first is printed: an error leaves stdout empty.
    """
    screen = _screen(options)
    lines: list[Any] = []
    if inspector.n_skipped:
        note = (
            f"tokens skipped at the start of the text: {inspector.n_skipped:,}; positions count "
            "from the next one"
        )
        lines.append(Text(note, style="dim"))
    for i, view in enumerate(options.views):
        lines += [""] if i else []
        if view is View.training:
            lines += training_lines(inspector.bundle.path)
        else:
            report = _report(view, inspector, options)
            lines += draw_view(view, report, inspector, options, screen)
    _ensure_checked(inspector, options)
    if inspector.checks and View.verify not in options.views:
        lines.append(checks_footer(inspector.checks))
    console.show(*lines, wrap=screen.limited)
    _require_passed(inspector)


def _screen(options: InspectOptions) -> Screen:
    return Screen(
        width=out.width,
        limited=out.is_terminal or options.width is not None,
        is_terminal=out.is_terminal,
        has_color=console.has_color_ramp(),
    )


def _ensure_checked(inspector: Inspector, options: InspectOptions) -> None:
    if set(options.views) - VIEWS_WITHOUT_TEXT:
        inspector.ensure_checked()


def print_json(inspector: Inspector, options: InspectOptions) -> None:
    """Print one object: the model, the text, and one field per view."""
    record: dict[str, Any] = {"schema": _SCHEMA, "tgen": __version__}
    record["model"] = json_value(inspector.summary)
    record |= _text_fields(inspector)
    for view in options.views:
        if view is View.training:
            record[view.value] = log.read(inspector.bundle.path)
        elif view is not View.model:
            record[view.value] = _report(view, inspector, options)
    _ensure_checked(inspector, options)
    if inspector.checks:
        record["verify"] = _check_records(inspector)
    _print_record(record)
    _require_passed(inspector)


def _text_fields(inspector: Inspector) -> dict[str, Any]:
    if not inspector.ids:
        return {}
    pairs = zip(inspector.ids, inspector.tokens, strict=True)
    tokens = [{"id": i} | json_text(token) for i, token in pairs]
    return {"n_skipped": inspector.n_skipped, "text": tokens}


def _check_records(inspector: Inspector) -> list[dict[str, Any]]:
    return [json_value(check) | {"passed": check.passed} for check in inspector.checks]


def _print_record(record: dict[str, Any]) -> None:
    for piece in json_pieces(record):
        console.write(piece.encode())


def json_pieces(record: dict[str, Any]) -> Iterator[str]:
    """Yield an object as text, one report of a list at a time: reports of long texts are large."""
    for i, (name, value) in enumerate(record.items()):
        yield f"{', ' if i else '{'}{to_json(name)}: "
        if isinstance(value, list):
            yield "["
            for j, one in enumerate(value):
                yield (", " if j else "") + to_json(json_value(one))
            yield "]"
        else:
            yield to_json(json_value(value))
    yield "}\n"


def write_files(inspector: Inspector, options: InspectOptions) -> None:
    """Write the files: a CSV has all matrices of the view, a picture has one."""
    contents: dict[str, bytes] = {}
    view, formats = options.views[0], set(options.files) - {"--html"}
    if formats:
        report = _report(view, inspector, options)
        for name in formats:
            contents[name] = _file_content(name, view, report, inspector, options)
    if "--html" in options.files:
        from tgen.drawing.page.attention_page import attention_page

        with _progress(options) as progress:
            page = attention_page(
                inspector,
                layer=options.layer,
                head=options.head,
                measure=options.measure,
                ablate=options.ablate,
                scale=options.scale,
                progress=progress,
            )
        contents["--html"] = page.encode()
    for name, path in options.files.items():
        if str(path) == "-":
            console.write(contents[name])
        else:
            files.write_output(path, contents[name])
            size = f"{len(contents[name]):,} bytes"
            console.print_status(f"wrote {path}, {size}", quiet=options.quiet)
    _ensure_checked(inspector, options)
    if inspector.checks:
        console.print_status(checks_footer(inspector.checks).plain, quiet=options.quiet)
    _require_passed(inspector)


def print_comparison(inspectors: list[Inspector], options: InspectOptions) -> None:
    """Print the heads of two models over the same text."""
    if inspectors[0].ids != inspectors[1].ids:
        raise UsageError(
            "--model: the models tokenize this text differently",
            "compare models with the same tokenizer",
        )
    if len({(one.config.n_layers, one.config.n_heads) for one in inspectors}) > 1:
        shapes = [
            f"n_layers={one.config.n_layers}, n_heads={one.config.n_heads}" for one in inspectors
        ]
        raise UsageError(
            f"--model: the models have different shapes ({' and '.join(shapes)})",
            "compare models with the same number of layers and heads",
        )
    first, second = (_report(View.heads, inspector, options) for inspector in inspectors)
    if options.json:
        record = {
            "schema": _SCHEMA,
            "tgen": __version__,
            "models": [json_value(inspector.summary) for inspector in inspectors],
            **_text_fields(inspectors[0]),
            "heads": [json_value(report) for report in (first, second)],
            "verify": [_check_records(inspector) for inspector in inspectors],
        }
        _print_record(record)
    else:
        screen = _screen(options)
        shifts = [attention_shift(a, b) for a, b in zip(first.heads, second.heads, strict=True)]
        width = screen.width if screen.limited else None
        lines = comparison_table(first, second, shifts, width=width)
        console.show(*lines, checks_footer(inspectors[1].checks), wrap=screen.limited)
    for inspector in inspectors:
        _require_passed(inspector)


def _report(view: View, inspector: Inspector, options: InspectOptions) -> Any:
    with _progress(options, view) as progress:
        return make_report(view, inspector, options, progress)


def _progress(
    options: InspectOptions, view: View = View.heads
) -> AbstractContextManager[Callable[[float], None]]:
    hidden = options.quiet or not (view is View.heads and options.ablate)
    return console.progress("ablating heads", quiet=hidden)


def _file_content(
    name: str, view: View, report: Any, inspector: Inspector, options: InspectOptions
) -> bytes:
    if name == "--csv":
        return csv_text(csv_rows(report, inspector.ids, inspector.tokens)).encode()
    maps = heat_maps(view, report, inspector, options)
    if view is not View.positions and len(maps) > 1:
        raise UsageError(
            f"{name}: writes one matrix (got {len(maps)})", "select one --layer and one --head"
        )
    if name == "--svg":
        from tgen.drawing.heat_map_files import svg

        return svg(maps[0]).encode()
    if name == "--png":
        from tgen.drawing.heat_map_files import png

        return png(maps[0])
    from tgen.drawing.heat_map_files import vega

    return json.dumps(vega(maps[0]), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _require_passed(inspector: Inspector) -> None:
    """Raise TgenError if a self-check failed."""
    failed = [check.name for check in inspector.checks if not check.passed]
    if failed:
        raise TgenError(
            f"{len(failed)} of {len(inspector.checks)} self-checks failed: {failed[0]}",
            "do not trust this output: it differs from the model's computation; see --view verify",
        )
