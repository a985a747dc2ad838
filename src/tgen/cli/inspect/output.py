"""Where `tgen inspect` puts what it saw: tables, one JSON object, or files."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from tgen import __version__
from tgen.cli import console
from tgen.cli.inspect.csv import csv_rows, csv_text
from tgen.cli.inspect.heatmap.builders import attention_map
from tgen.cli.inspect.tables.checks import footer
from tgen.cli.inspect.tables.heads import compare_view
from tgen.cli.inspect.training_log import training_lines
from tgen.cli.inspect.view_names import TEXTLESS, View
from tgen.cli.inspect.views import (
    TELLING,
    Options,
    Screen,
    draw_view,
    heat_maps,
    report_of,
    select_heads,
)
from tgen.errors import TgenError, UsageError
from tgen.inspection.heads import attention_shift
from tgen.inspection.inspector import Inspector
from tgen.reports import json_text, json_value
from tgen.runs.storage import log
from tgen.storage import files

_PAGE_LIMIT = 24 * 10**6  # bytes: what a browser opens without a pause


def show(views: list[View], look: Inspector, options: Options, *, quiet: bool) -> None:
    """Tables on stdout, and below them whether they are what the model does.

    All are made before the first is shown: where one is refused nothing is.
    """
    screen = _screen(options)
    things: list[Any] = []
    if look.n_left_out:
        said = f"the first {look.n_left_out:,} tokens of the text are left out; 0 is the next one"
        things.append(Text(said, style="dim"))
    for i, view in enumerate(views):
        things += [""] if i else []
        if view is View.training:
            things += training_lines(look.bundle.path)
        else:
            report = _report(view, look, options, quiet=quiet)
            things += draw_view(view, report, look, options, screen)
    _confirm(views, look)
    if look.checks and View.verify not in views:
        things.append(footer(look.checks))
    console.show(*things, wrap=screen.fits)
    _fail(look)


def _screen(options: Options) -> Screen:
    out = console.out
    coloured = out.color_system in ("256", "truecolor") and not out.no_color
    if not coloured:  # sixteen colours, a terminal's own, are no ramp
        out.no_color = True
    fits = out.is_terminal or options.width is not None
    return Screen(width=out.width, fits=fits, is_terminal=out.is_terminal, coloured=coloured)


def _confirm(views: list[View], look: Inspector) -> None:
    """Whatever is shown of a text stands on the model's weights being what they are said to be."""
    if set(views) - TEXTLESS:
        look.confirm()


def write_json(views: list[View], look: Inspector, options: Options, *, quiet: bool) -> None:
    """One object on stdout: the model, the text, and a field a view."""
    record: dict[str, Any] = {"schema": "tgen.inspect/2", "tgen": __version__}
    record["model"] = json_value(look.summary)
    record |= _text(look)
    for view in views:
        if view is View.training:
            record[view.value] = log.read(look.bundle.path)
        elif view is not View.model:
            record[view.value] = json_value(_report(view, look, options, quiet=quiet))
    _confirm(views, look)
    if look.checks:
        record["verify"] = _checks(look)
    _write_record(record)
    _fail(look)


def _text(look: Inspector) -> dict[str, Any]:
    """The tokens that are looked at, and how many came before them."""
    if not look.ids:
        return {}
    pairs = zip(look.ids, look.tokens, strict=True)
    tokens = [{"id": i} | json_text(token) for i, token in pairs]
    return {"left_out": look.n_left_out, "text": tokens}


def _checks(look: Inspector) -> list[dict[str, Any]]:
    return [json_value(check) | {"holds": check.holds} for check in look.checks]


def _write_record(record: dict[str, Any]) -> None:
    console.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def write_files(
    view: View, look: Inspector, options: Options, wanted: dict[str, Path], *, quiet: bool
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
            console.print_status(f"wrote {path}, {len(contents[name]):,} bytes", quiet=quiet)
    _confirm([view], look)
    if look.checks:
        console.print_status(footer(look.checks).plain, quiet=quiet)
    _fail(look)


def compare(looks: list[Inspector], options: Options, *, json_output: bool, quiet: bool) -> None:
    """The heads of two models over the same text."""
    if looks[0].ids != looks[1].ids:
        raise UsageError(
            "the models read this text as different tokens", "compare models of one tokenizer"
        )
    if len({(look.config.n_layers, look.config.n_heads) for look in looks}) > 1:
        shapes = [f"{look.config.n_layers} layers of {look.config.n_heads} heads" for look in looks]
        raise UsageError(
            f"the models have {' and '.join(shapes)}", "only models of one shape are compared"
        )
    first, second = (_report(View.heads, look, options, quiet=quiet) for look in looks)
    if json_output:
        record = {
            "schema": "tgen.inspect/2",
            "tgen": __version__,
            "models": [json_value(look.summary) for look in looks],
            **_text(looks[0]),
            "heads": [json_value(report) for report in (first, second)],
            "verify": [_checks(look) for look in looks],
        }
        _write_record(record)
    else:
        screen = _screen(options)
        far = [attention_shift(a, b) for a, b in zip(first.heads, second.heads, strict=True)]
        table = compare_view(first, second, far, width=screen.width if screen.fits else None)
        console.show(*table, footer(looks[1].checks), wrap=screen.fits)
    for look in looks:
        _fail(look)


def _report(view: View, look: Inspector, options: Options, *, quiet: bool) -> Any:
    hidden = quiet or not (view is View.heads and options.ablate)
    with console.progress("heads without which the text is read", quiet=hidden) as progress:
        return report_of(view, look, options, progress)


def _content(name: str, view: View, report: Any, look: Inspector, options: Options) -> bytes:
    if name == "--csv":
        return csv_text(csv_rows(report, look.ids, look.tokens)).encode()
    maps = heat_maps(view, report, look, options)
    if view is not View.positions and len(maps) > 1:
        raise UsageError(
            f"{name} draws one matrix, {len(maps)} are chosen", "choose one --layer and one --head"
        )
    if name == "--svg":
        from tgen.cli.inspect.heatmap.svg import svg

        return svg(maps[0]).encode()
    if name == "--png":
        from tgen.cli.inspect.heatmap.png import png

        return png(maps[0])
    from tgen.cli.inspect.heatmap.vega import vega

    return json.dumps(vega(maps[0]), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _page(look: Inspector, options: Options, *, quiet: bool) -> str:
    from tgen.cli.inspect.heatmap.svg import svg
    from tgen.cli.inspect.page.page import page, page_bytes

    chosen = select_heads(look, options, otherwise="all")
    size = page_bytes(len(chosen), len(look.ids))
    if size > _PAGE_LIMIT:
        raise UsageError(
            f"--html would hold {size / 1e6:,.0f} MB of weights, more than {_PAGE_LIMIT / 1e6:.0f}",
            "choose fewer with --layer and --head, or a shorter text",
        )
    apart = len(look.ids) > 1 and options.head != "mean"
    heads = _report(View.heads, look, options, quiet=quiet) if apart else None
    telling = look.most_focused_head(sorted({layer for layer, _ in chosen}))
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


def _fail(look: Inspector) -> None:
    """Raises TgenError where something does not hold: what was shown is not to be believed."""
    wrong = [check.name for check in look.checks if not check.holds]
    if wrong:
        raise TgenError(
            f"{len(wrong)} of {len(look.checks)} checks fail: {wrong[0]}",
            "what was shown is not what the model does",
        )
