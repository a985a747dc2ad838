"""What `tgen inspect` was asked to show: views -> reports -> drawings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tgen.cli.inspect.heatmap.builders import attention_map, positions_map, rollout_map
from tgen.cli.inspect.heatmap.heatmap import HeatMap, Scale
from tgen.cli.inspect.heatmap.terminal import Cells, draw_cells
from tgen.cli.inspect.tables.checks import checks_table
from tgen.cli.inspect.tables.heads import heads_view
from tgen.cli.inspect.tables.model_summary import summary_view
from tgen.cli.inspect.tables.predictions import lens_view, prediction_table, why_view
from tgen.cli.inspect.tables.tokens import token_table
from tgen.cli.inspect.view_names import MATRICES, View
from tgen.cli.ranges import parse_indices, parse_slice
from tgen.cli.render.token_labels import label
from tgen.errors import UsageError
from tgen.inspection.ablation import Ablate
from tgen.inspection.attention import Measure
from tgen.inspection.inspector import Inspector, Place

TELLING = "it looks most at one other token"
_TELLING = 3  # tokens of a text that can tell
_ROWS = 40  # of a table of tokens, unless others are asked for


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to look at, and how."""

    layer: str | None
    head: str | None
    query: str | None
    keys: str | None
    top: int | None
    target: bytes | None
    measure: Measure
    ablate: Ablate | None
    cells: Cells
    scale: Scale
    hide_first: bool
    width: int | None


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What is drawn on."""

    width: int  # columns
    fits: bool  # whether lines must fit: not in a pipe, unless a width was asked for
    is_terminal: bool
    coloured: bool  # with a ramp of colours, not sixteen


def select_heads(look: Inspector, options: Options, *, otherwise: str) -> list[Place]:
    """The layers and heads that are named; `otherwise` counts for what is not, or the most telling
    head if that is "auto"."""
    config = look.config
    layers = parse_indices("--layer", options.layer or "all", config.n_layers)
    if options.head is None and otherwise == "auto":
        return [look.most_focused_head(layers)]
    if options.head == "mean":
        heads: list[int | None] = [None]
    else:
        heads = list(parse_indices("--head", options.head or otherwise, config.n_heads))
    if options.layer is None and otherwise == "auto":
        layers = layers[-1:]
    return [(layer, head) for layer in layers for head in heads]


def report_of(
    view: View, look: Inspector, options: Options, progress: Callable[[float], None]
) -> Any:
    """The report, or reports, of a view that is not of the training."""
    n, top = len(look.ids), options.top
    rows = _asked(options, n) or range(n)
    if view in (View.predict, View.why) and options.query is not None and len(rows) > 1:
        raise UsageError(
            f"--query {options.query} names {len(rows)} tokens, --view {view} is of one",
            f"for example --query {rows[-1]}",
        )
    query = rows[-1] if n else -1
    if view is View.attention:
        why = "" if options.head is not None or n < _TELLING else f"chosen: {TELLING}"
        chosen = select_heads(look, options, otherwise="auto")
        return look.attention(chosen, measure=options.measure, why=why)
    if view is View.heads:
        report = look.heads(ablate=options.ablate, progress=progress)
        if options.head == "mean":
            raise UsageError("--head mean is none of the heads", "it is for --view attention")
        named = select_heads(look, options, otherwise="all")
        return replace(report, heads=[h for h in report.heads if (h.layer, h.head) in named])
    if view is View.tokens:
        return look.text
    if view is View.predict:
        return look.predictions(query=query, top=top or 10)
    if view is View.lens:
        return look.lens(query=query, first=rows[0], last=query, top=top or 5)
    if view is View.why:
        return look.why(query=query, target=options.target)
    if view is View.rollout:
        layers = parse_indices("--layer", options.layer or "-1", look.config.n_layers)
        return [report for report in look.rollout() if report.layer in layers]
    if view is View.positions:
        return look.positions()
    return look.summary if view is View.model else look.verify()


def heat_maps(view: View, report: Any, look: Inspector, options: Options) -> list[HeatMap]:
    """Those of a view that has matrices."""
    if view is View.attention:
        return [attention_map(one, look.tokens, scale=options.scale) for one in report]
    if view is View.rollout:
        return [rollout_map(one, look.tokens, scale=options.scale) for one in report]
    return [positions_map(one) for one in report]


def _asked(options: Options, n: int) -> range | None:
    """The tokens of --query, if it was given and there is a text."""
    return parse_slice("--query", options.query, n) if options.query is not None and n else None


def draw_view(
    view: View, report: Any, look: Inspector, options: Options, screen: Screen
) -> list[Any]:
    """What the terminal shows of a view."""
    n = len(look.ids)
    asked, width = _asked(options, n), screen.width
    if view in MATRICES:
        things: list[Any] = []
        for heat in heat_maps(view, report, look, options):
            n_columns = heat.values.shape[1]
            keys = None if options.keys is None else parse_slice("--keys", options.keys, n_columns)
            if keys is None and options.hide_first and n_columns > 1:
                keys = range(1, n_columns)
            things += ["", *draw_cells(
                heat, cells=options.cells, width=width, is_terminal=screen.is_terminal,
                coloured=screen.coloured, rows=asked if view is not View.positions else None,
                columns=keys, top=options.top or 4,
            )]  # fmt: skip
        return things[1:]
    if view is View.heads:
        return list(heads_view(report, width=width if screen.fits else None))
    if view is View.tokens:
        rows = asked or range(max(0, n - _ROWS) if screen.is_terminal else 0, n)
        return list(token_table(report, rows=rows, width=width, coloured=screen.coloured))
    query = asked[-1] if asked else n - 1
    if view is View.predict:
        after = f"{query} {label(look.tokens[query], width=16)}"
        return [prediction_table(report, after=after, width=width)]
    if view is View.lens:
        return list(lens_view(report, look.tokens, width=width))
    if view is View.why:
        return list(why_view(report, look.tokens[query], top=options.top or 15, width=width))
    return list(summary_view(report) if view is View.model else checks_table(report))
