"""The views of `tgen inspect`: from options to a report, and from a report to terminal output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tgen.cli.inspect.command import MATRIX_VIEWS, InspectOptions, View
from tgen.config.ranges import parse_indices, parse_slice
from tgen.drawing.head_tables import heads_table
from tgen.drawing.heat_map import AUTO_SELECTED, HeatMap, attention_map, positions_map, rollout_map
from tgen.drawing.heat_map_terminal import draw_heat_map
from tgen.drawing.tables import (
    attribution_table,
    checks_table,
    lens_table,
    prediction_table,
    summary_table,
    token_table,
)
from tgen.drawing.terminal_text import label
from tgen.errors import UsageError
from tgen.inspection.inspector import Inspector

_MIN_TOKENS_TO_SELECT = 3  # shorter texts have no token besides the first and the query
_MAX_TOKEN_ROWS = 40  # in the token table at a terminal, unless --query selects


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Properties of stdout that drawing depends on."""

    width: int  # columns
    limited: bool  # whether lines must fit: at a terminal, or with --width
    is_terminal: bool
    has_color: bool  # 256 colors or more: enough for the color ramp


def make_report(
    view: View, inspector: Inspector, options: InspectOptions, progress: Callable[[float], None]
) -> Any:
    """Return the report, or list of reports, of a view other than training."""
    n, top = len(inspector.ids), options.top
    queries = _selected_queries(options, n) or range(n)
    if view in (View.predict, View.why) and options.query is not None and len(queries) > 1:
        raise UsageError(
            f"--query: --view {view} takes one position (got {len(queries)})",
            f"use, for example, --query {queries[-1]}",
        )
    query = queries[-1] if n else -1
    if view is View.attention:
        is_auto = options.head is None and n >= _MIN_TOKENS_TO_SELECT
        return inspector.attention(
            inspector.select_heads(options.layer, options.head, default="auto"),
            measure=options.measure,
            selection=AUTO_SELECTED if is_auto else "",
        )
    if view is View.heads:
        if options.head == "mean":
            raise UsageError(
                "--head mean: not available for --view heads", "use it with --view attention"
            )
        selected = inspector.select_heads(options.layer, options.head, default="all")
        return inspector.heads(ablate=options.ablate, progress=progress, selected=selected)
    if view is View.tokens:
        return inspector.text
    if view is View.predict:
        return inspector.predictions(query=query, top=top or 10)
    if view is View.lens:
        return inspector.logit_lens(query=query, first=queries[0], last=query, top=top or 5)
    if view is View.why:
        return inspector.logit_attribution(query=query, target=options.target_bytes)
    if view is View.rollout:
        layers = parse_indices("--layer", options.layer or "-1", inspector.config.n_layers)
        return [report for report in inspector.rollout() if report.layer in layers]
    if view is View.positions:
        return inspector.positions()
    return inspector.summary if view is View.model else inspector.verify()


def heat_maps(
    view: View, reports: Any, inspector: Inspector, options: InspectOptions
) -> list[HeatMap]:
    """Return the heat maps of a view with matrices."""
    if view is View.attention:
        return [attention_map(one, inspector.tokens, scale=options.scale) for one in reports]
    if view is View.rollout:
        return [rollout_map(one, inspector.tokens, scale=options.scale) for one in reports]
    return [positions_map(one) for one in reports]


def _selected_queries(options: InspectOptions, n: int) -> range | None:
    return parse_slice("--query", options.query, n) if options.query is not None and n else None


def draw_view(
    view: View, report: Any, inspector: Inspector, options: InspectOptions, screen: Screen
) -> list[Any]:
    """Return a view for the terminal, as Rich renderables."""
    n, width = len(inspector.ids), screen.width
    selected = _selected_queries(options, n)
    if view in MATRIX_VIEWS:
        lines: list[Any] = []
        for heat in heat_maps(view, report, inspector, options):
            n_columns = heat.values.shape[1]
            keys = None if options.keys is None else parse_slice("--keys", options.keys, n_columns)
            if keys is None and options.hide_first and n_columns > 1:
                keys = range(1, n_columns)
            lines += ["", *draw_heat_map(
                heat, cells=options.cells, width=width, is_terminal=screen.is_terminal,
                has_color=screen.has_color, rows=None if view is View.positions else selected,
                columns=keys, top=options.top or 4,
            )]  # fmt: skip
        return lines[1:]
    if view is View.heads:
        return list(heads_table(report, width=width if screen.limited else None))
    if view is View.tokens:
        rows = selected or range(max(0, n - _MAX_TOKEN_ROWS) if screen.is_terminal else 0, n)
        return list(token_table(report, rows=rows, width=width, has_color=screen.has_color))
    query = selected[-1] if selected else n - 1
    if view is View.predict:
        context = f"{query} {label(inspector.tokens[query], width=16)}"
        return [prediction_table(report, context=context, width=width)]
    if view is View.lens:
        return list(lens_table(report, inspector.tokens, width=width))
    if view is View.why:
        token = inspector.tokens[query]
        return list(attribution_table(report, token, top=options.top or 15, width=width))
    return list(summary_table(report) if view is View.model else checks_table(report))
