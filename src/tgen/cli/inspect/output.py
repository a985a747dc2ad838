"""The output of `tgen inspect`: tables, one JSON object, or files."""

import json
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from tgen.checkpoint import model_dir, safetensors_file
from tgen.cli import console
from tgen.cli.inspect.options import WITHOUT_VIEW, InspectOptions
from tgen.cli.inspect.sources import search_sources, source_rows
from tgen.cli.inspect.training_curves import training_lines
from tgen.cli.json_output import printable_json
from tgen.cli.output_options import csv_text, write_contents
from tgen.cli.rich_console import out
from tgen.drawing.head_tables import comparison_table
from tgen.drawing.tables import checks_footer
from tgen.drawing.view_options import VIEWS_WITHOUT_TEXT, View
from tgen.drawing.views import ABLATING, VIEWS, Screen, ViewOutput, measure_heads, sources_output
from tgen.errors import TgenError, UsageError
from tgen.inspection.heads import attention_shift
from tgen.inspection.inspector import Inspector
from tgen.reports.json_text import json_text, json_value
from tgen.runs import log
from tgen.storage import files
from tgen.version import __version__

_SCHEMA, _ACTIVATIONS_SCHEMA = "tgen.inspect/3", "tgen.activations/1"


def print_tables(inspector: Inspector, options: InspectOptions) -> None:
    """Print all views, and the result of the self-checks.

    All are computed before the first is printed: an error leaves stdout empty.
    """
    console.has_color_ramp()  # turns color off if there is none
    fits = _fits_lines(options)
    has_color = not out.no_color
    screen = Screen(out.width, is_terminal=out.is_terminal, has_color=has_color, fits=fits)
    lines: list[object] = []
    if inspector.n_skipped:
        note = (
            f"tokens skipped at the start of the text: {inspector.n_skipped:,}; positions count "
            "from the next one"
        )
        lines.append(Text(note, style="dim"))
    for i, view in enumerate(options.views):
        lines += [""] if i else []
        lines += _compute_view(view, inspector, options).draw(screen)
    _ensure_checked(inspector, options)
    if inspector.checks and View.verify not in options.views:
        lines.append(checks_footer(inspector.checks))
    console.show(*lines, wrap=fits)
    _require_passed(inspector)


def _compute_view(view: View, inspector: Inspector, options: InspectOptions) -> ViewOutput:
    if view is View.training:
        records = log.read(inspector.bundle.path)
        return ViewOutput(records, lambda _: training_lines(records))
    if view is View.sources:
        text = b"".join(inspector.tokens)
        report = search_sources(inspector.bundle.named_path, text, options)
        return sources_output(report, source_rows(report))
    return VIEWS[view](inspector, options, console.late_progress)


def _fits_lines(options: InspectOptions) -> bool:
    """Whether lines must fit into the width of stdout: at a terminal, or with --width."""
    return out.is_terminal or options.width is not None


def _ensure_checked(inspector: Inspector, options: InspectOptions) -> None:
    if set(options.views) - VIEWS_WITHOUT_TEXT:
        inspector.ensure_checked()


def print_json(inspector: Inspector, options: InspectOptions) -> None:
    """Print one object: the model, the text, and one field per view."""
    record: dict[str, Any] = {"schema": _SCHEMA, "tgen": __version__}
    record["model"] = json_value(inspector.summary)
    record |= _text_fields(inspector)
    for view in options.views:
        if view is not View.model:
            record[view.value] = _compute_view(view, inspector, options).report
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
        yield f"{', ' if i else '{'}{printable_json(name)}: "
        if isinstance(value, list):
            yield "["
            for j, one in enumerate(value):
                yield (", " if j else "") + printable_json(json_value(one))
            yield "]"
        else:
            yield printable_json(json_value(value))
    yield "}\n"


def write_files(inspector: Inspector, options: InspectOptions) -> None:
    """Write the files: a CSV has all matrices of the view, a picture has one."""
    contents: dict[str, files.Content] = {}
    formats = set(options.files) - WITHOUT_VIEW
    if formats:
        (view,) = options.views
        output = _compute_view(view, inspector, options)
        for name in formats:
            contents[name] = _file_content(name, view, output)
    if "--html" in options.files:
        from tgen.drawing.page.attention_page import attention_page

        with console.late_progress(ABLATING) as progress:
            page = attention_page(inspector, options, progress)
        contents["--html"] = page.html.encode()
    if "--activations" in options.files:
        contents["--activations"] = _activations(inspector, options)
    write_contents(contents, options.files)
    _ensure_checked(inspector, options)
    if inspector.checks:
        console.print_status(checks_footer(inspector.checks).plain)
    _require_passed(inspector)


def _activations(inspector: Inspector, options: InspectOptions) -> files.Content:
    """Return a safetensors file, whose metadata names the model and has the tokens as JSON."""
    fields = {name: json.dumps(value) for name, value in _text_fields(inspector).items()}
    metadata = {
        "schema": _ACTIVATIONS_SCHEMA,
        "tgen": __version__,
        "model": str(inspector.bundle.path).encode(errors="replace").decode(),
        "model_sha256": model_dir.digest(inspector.bundle),
    }
    arrays = inspector.activations(options.layer, options.parts)
    return safetensors_file.serialize_in_parts(arrays, metadata=metadata | fields)


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
    first, second = (
        measure_heads(inspector, options, console.late_progress) for inspector in inspectors
    )
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
        console.has_color_ramp()  # turns color off if there is none
        shifts = [attention_shift(a, b) for a, b in zip(first.heads, second.heads, strict=True)]
        width = out.width if _fits_lines(options) else None
        lines = comparison_table(first, second, shifts, width=width)
        console.show(*lines, checks_footer(inspectors[1].checks), wrap=_fits_lines(options))
    for inspector in inspectors:
        _require_passed(inspector)


def _file_content(name: str, view: View, output: ViewOutput) -> bytes:
    if name == "--csv":
        return csv_text(output.rows).encode()
    from tgen.drawing.heat_map_files import png, svg, vega

    maps = output.maps()
    if view is not View.positions and len(maps) > 1:
        raise UsageError(
            f"{name}: writes one matrix (got {len(maps)})",
            "pass one of --parts" if view is View.patch else "select one --layer and one --head",
        )
    if name == "--svg":
        return svg(maps[0]).encode()
    if name == "--png":
        return png(maps[0])
    return json.dumps(vega(maps[0]), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _require_passed(inspector: Inspector) -> None:
    """Raise TgenError if a self-check failed."""
    failed = [check.name for check in inspector.checks if not check.passed]
    if failed:
        raise TgenError(
            f"{len(failed)} of {len(inspector.checks)} self-checks failed: {failed[0]}",
            "do not trust this output: it differs from the model's computation; see --view verify",
        )
