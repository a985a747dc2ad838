"""Where `tgen inspect` puts what it saw: tables, one JSON object, or files."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgen import __version__, files
from tgen.checkpoint import run_log
from tgen.cli import console
from tgen.cli.looking import TELLING, Options, drawn, heat_maps, places, report_of
from tgen.cli.training_output import training_lines
from tgen.cli.view import View
from tgen.cli.views.checks import footer
from tgen.cli.views.heads import compare_view, same_heads
from tgen.cli.views.heatmaps import attention_map
from tgen.cli.views.spreadsheet import csv_rows, csv_text
from tgen.errors import TgenError, UsageError
from tgen.introspect.look import Look
from tgen.reports import json_text, json_value

_PAGE_LIMIT = 24 * 10**6  # bytes: what a browser opens without a pause


def show(views: list[View], look: Look, options: Options, *, quiet: bool) -> None:
    """Tables on stdout, and below them whether they are what the model does."""
    terminal, width = console.out.is_terminal, console.out.width
    for i, view in enumerate(views):
        if view is View.training:
            things = training_lines(look.bundle.path)
        else:
            report = _report(view, look, options, quiet=quiet)
            things = drawn(view, report, look, options, width=width, is_terminal=terminal)
        console.show(*([""] if i else []), *things)
    if look.checks and View.verify not in views:
        console.show(footer(look.checks))
    _fail(look)


def write_json(views: list[View], look: Look, options: Options, *, quiet: bool) -> None:
    """One object on stdout: the model, the text, and a field a view."""
    record: dict[str, Any] = {"schema": "tgen.inspect/2", "tgen": __version__}
    record["model"] = json_value(look.summary)
    if look.ids:
        pairs = zip(look.ids, look.tokens, strict=True)
        record["text"] = [{"id": i} | json_text(token) for i, token in pairs]
    for view in views:
        if view is View.training:
            record[view.value] = run_log.read(look.bundle.path)
        elif view is not View.model:
            record[view.value] = json_value(_report(view, look, options, quiet=quiet))
    if look.checks:
        record["verify"] = [json_value(c) | {"holds": c.holds} for c in look.checks]
    console.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    _fail(look)


def write_files(
    view: View, look: Look, options: Options, wanted: dict[str, Path], *, quiet: bool
) -> None:
    """A view's numbers or pictures; of several matrices all in the CSV, one in a picture."""
    contents: dict[str, bytes] = {}
    if set(wanted) - {"--html"}:
        report = _report(view, look, options, quiet=quiet)
        for name in set(wanted) - {"--html"}:
            contents[name] = _content(name, view, report, look, options)
    if "--html" in wanted:
        contents["--html"] = _page(look, options, quiet=quiet).encode()
    for name, path in wanted.items():
        if str(path) == "-":
            sys.stdout.flush()
            console.write(contents[name])
        else:
            files.put(path, contents[name])
            console.note(f"wrote {path}, {len(contents[name]):,} bytes", quiet=quiet)
    _fail(look)


def compare(looks: list[Look], options: Options, *, json_output: bool, quiet: bool) -> None:
    """The heads of two models over the same text."""
    if looks[0].ids != looks[1].ids:
        raise UsageError(
            "the models read this text as different tokens", "compare models of one tokenizer"
        )
    reports = [_report(View.heads, look, options, quiet=quiet) for look in looks]
    if not same_heads(*reports):
        shapes = [f"{look.config.n_layers} layers of {look.config.n_heads} heads" for look in looks]
        raise UsageError(
            f"the models have {' and '.join(shapes)}", "only models of one shape are compared"
        )
    if json_output:
        record = {
            "schema": "tgen.inspect/2",
            "tgen": __version__,
            "models": [json_value(look.summary) for look in looks],
            "heads": [json_value(report) for report in reports],
        }
        console.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    else:
        console.show(*compare_view(*reports), footer(looks[1].checks))
    for look in looks:
        _fail(look)


def _report(view: View, look: Look, options: Options, *, quiet: bool) -> Any:
    hidden = quiet or not (view is View.heads and options.ablate)
    with console.progress("heads without which the text is read", quiet=hidden) as progress:
        return report_of(view, look, options, progress)


def _content(name: str, view: View, report: Any, look: Look, options: Options) -> bytes:
    if name == "--csv":
        return csv_text(csv_rows(report, look.tokens)).encode()
    maps = heat_maps(view, report, look, options)
    if view is not View.positions and len(maps) > 1:
        raise UsageError(
            f"{name} draws one matrix, {len(maps)} are chosen", "choose one --layer and one --head"
        )
    if name == "--svg":
        from tgen.cli.views.svg import svg

        return svg(maps[0]).encode()
    if name == "--png":
        from tgen.cli.views.png import png

        return png(maps[0])
    from tgen.cli.views.vega import vega

    return json.dumps(vega(maps[0]), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _page(look: Look, options: Options, *, quiet: bool) -> str:
    from tgen.cli.views.page import page, page_bytes
    from tgen.cli.views.svg import svg

    chosen = places(look, options, otherwise="all")
    size = page_bytes(len(chosen), len(look.ids))
    if size > _PAGE_LIMIT:
        raise UsageError(
            f"--html would hold {size / 1e6:,.0f} MB of weights, more than {_PAGE_LIMIT / 1e6:.0f}",
            "choose fewer with --layer and --head, or a shorter text",
        )
    heads = _report(View.heads, look, options, quiet=quiet)
    telling = look.telling_head(sorted({layer for layer, _ in chosen}))
    start = telling if telling in chosen else chosen[0]  # where the page opens
    attention = [
        replace(one, why=TELLING) if (one.layer, one.head) == start == telling else one
        for one in look.attention(chosen, measure=options.measure)
    ]
    still = attention_map(attention[chosen.index(start)], look.tokens, scale=options.scale)
    return page(
        name=look.bundle.path.name,
        summary=look.summary,
        text=look.text,
        attention=attention,
        heads=heads,
        lens=None if look.config.post_norm else look.lens(),
        checks=look.checks,
        still=svg(still),
    )


def _fail(look: Look) -> None:
    """Raises TgenError where something does not hold: what was shown is not to be believed."""
    wrong = [check.name for check in look.checks if not check.holds]
    if wrong:
        raise TgenError(
            f"{len(wrong)} of {len(look.checks)} checks fail: {wrong[0]}",
            "what was shown is not what the model does",
        )
