"""The views of `tgen inspect` and `Model.inspect`: each computes its report, and draws it or lists
it as CSV."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from rich.table import Table
from rich.text import Text

from tgen.config import SamplingConfig
from tgen.config.index_ranges import parse_indices, parse_slice
from tgen.drawing.head_tables import heads_table
from tgen.drawing.heat_map import (
    AUTO_SELECTED,
    HeatMap,
    attention_map,
    patch_map,
    positions_map,
    rollout_map,
)
from tgen.drawing.heat_map_terminal import draw_heat_map
from tgen.drawing.tables import (
    ablation_table,
    attribution_table,
    checks_table,
    distribution_table,
    lens_table,
    prediction_table,
    sources_table,
    summary_table,
    token_table,
)
from tgen.drawing.terminal_text import label
from tgen.drawing.view_options import View, ViewOptions
from tgen.errors import UsageError
from tgen.generation.distribution import sampling_distribution
from tgen.inspection.inspector import Inspector
from tgen.loaded_model import make_vocabulary
from tgen.reports.inspection import (
    AttentionReport,
    HeadReport,
    HeadsReport,
    RolloutReport,
    SourcesReport,
    TokenReport,
)

_MIN_TOKENS_TO_SELECT = 3  # shorter texts have no token besides the first and the query
_MAX_TOKEN_ROWS = 40  # in the token table at a terminal, unless --query selects
_MAX_DISTANCES = 64  # of rotary positions in a picture

Row = Sequence[object]
ABLATING = "ablating heads"


# Takes a label, and yields a function that takes the fraction done.
Progress = Callable[[str], AbstractContextManager[Callable[[float], None]]]


@contextmanager
def no_progress(_: str) -> Iterator[Callable[[float], None]]:
    """Show no progress."""
    yield lambda _: None


@dataclass(frozen=True)
class Screen:
    """The terminal or page that views are drawn for."""

    width: int  # columns
    is_terminal: bool = True
    has_color: bool = True
    fits: bool = True  # whether lines must fit into the width


@dataclass(frozen=True)
class ViewOutput:
    """A view's report, and what can be made of it."""

    report: object  # a report or a list of them, for JSON
    draw: Callable[[Screen], Iterable[object]]  # Rich renderables
    rows: Iterable[Row] = ()  # of a CSV file, the header first
    maps: Callable[[], list[HeatMap]] = list  # of its matrices


def _attention(inspector: Inspector, options: ViewOptions, _: Progress) -> ViewOutput:
    selected = inspector.select_heads(options.layer, options.head, default="auto")
    reports = inspector.attention(selected, measure=options.measure)
    if options.head is None and len(inspector.ids) >= _MIN_TOKENS_TO_SELECT:
        reports = [replace(one, selection=AUTO_SELECTED) for one in reports]
    return _weights(reports, attention_map, inspector, options)


def _rollout(inspector: Inspector, options: ViewOptions, _: Progress) -> ViewOutput:
    chosen = "-1" if options.layer is None else options.layer
    layers = parse_indices("--layer", chosen, inspector.config.n_layers)
    reports = [report for report in inspector.rollout() if report.layer in layers]
    return _weights(reports, rollout_map, inspector, options)


def _weights(
    reports: Sequence[AttentionReport | RolloutReport],
    to_map: Callable[..., HeatMap],
    inspector: Inspector,
    options: ViewOptions,
) -> ViewOutput:
    def maps() -> list[HeatMap]:
        return [to_map(one, inspector.tokens, scale=options.scale) for one in reports]

    draw = partial(_draw_maps, maps, _selected_queries(inspector, options), options)
    return ViewOutput(reports, draw, weight_rows(reports, inspector.ids, inspector.tokens), maps)


def weight_rows(
    reports: Sequence[AttentionReport | RolloutReport], ids: Sequence[int], tokens: Sequence[bytes]
) -> Iterator[Row]:
    """Yield the header and one row per weight up to the diagonal."""
    numbers = ("layer", "head", "query", "key", "query_id", "key_id")
    yield *numbers, "query_token", "key_token", "weight"
    names = [label(token) for token in tokens]
    for one in reports:
        head = one.head if isinstance(one, AttentionReport) and one.head is not None else "mean"
        for i, values in enumerate(one.weights.tolist()):
            for j, value in enumerate(values[: i + 1]):
                yield one.layer, head, i, j, ids[i], ids[j], names[i], names[j], value


def _positions(inspector: Inspector, options: ViewOptions, _: Progress) -> ViewOutput:
    reports = inspector.positions()

    def maps() -> list[HeatMap]:
        return [positions_map(one) for one in reports]

    def pictures() -> list[HeatMap]:
        return [_first_distances(one) for one in maps()]

    def rows() -> Iterator[Row]:
        yield "kind", reports[0].row_name, reports[0].column_name, "value"
        for one in reports:
            for (i, j), value in np.ndenumerate(one.values):
                yield one.kind, i, j, float(value)

    return ViewOutput(reports, partial(_draw_maps, maps, None, options), rows(), pictures)


def _first_distances(heat: HeatMap) -> HeatMap:
    """Return a map without distances that make it too wide to read."""
    n = heat.values.shape[1]
    if heat.column_name != "distance" or n <= _MAX_DISTANCES:
        return heat
    return replace(
        heat,
        title=f"{heat.title}; distances 0 to {_MAX_DISTANCES - 1} of {n:,}",
        values=heat.values[:, :_MAX_DISTANCES],
        columns=heat.columns[:_MAX_DISTANCES],
    )


def _draw_maps(
    maps: Callable[[], list[HeatMap]], queries: range | None, options: ViewOptions, screen: Screen
) -> list[object]:
    lines: list[object] = []
    for heat in maps():
        n_columns = heat.values.shape[1]
        keys = None if options.keys is None else parse_slice("--keys", options.keys, n_columns)
        if keys is None and options.hide_first and heat.causal and n_columns > 1:
            keys = range(1, n_columns)
        if keys is None and heat.column_name == "distance":
            keys = range(min(_MAX_DISTANCES, n_columns))
        lines += ["", *draw_heat_map(
            heat, cells=options.cells, width=screen.width, is_terminal=screen.is_terminal,
            has_color=screen.has_color, rows=queries, columns=keys, top=options.top or 4,
        )]  # fmt: skip
    return lines[1:]


def measure_heads(inspector: Inspector, options: ViewOptions, progress: Progress) -> HeadsReport:
    """Return the metrics of the selected heads, by default of all."""
    if options.head == "mean":
        raise UsageError(
            "--head mean: not available for --view heads", "use it with --view attention"
        )
    selected = inspector.select_heads(options.layer, options.head, default="all")
    with progress(ABLATING) as update:
        return inspector.heads(ablate=options.ablate, progress=update, selected=selected)


def _heads(inspector: Inspector, options: ViewOptions, progress: Progress) -> ViewOutput:
    report = measure_heads(inspector, options, progress)
    return ViewOutput(
        report,
        lambda screen: heads_table(report, width=screen.width if screen.fits else None),
        field_rows(HeadReport, report.heads, without="distance_histogram"),
    )


def _tokens(inspector: Inspector, options: ViewOptions, _: Progress) -> ViewOutput:
    queries, n = _selected_queries(inspector, options), len(inspector.ids)
    report = inspector.text

    def draw(screen: Screen) -> list[Table | Text]:
        rows = queries or range(max(0, n - _MAX_TOKEN_ROWS) if screen.is_terminal else 0, n)
        return token_table(report, rows=rows, width=screen.width, has_color=screen.has_color)

    return ViewOutput(report, draw, field_rows(TokenReport, report.tokens))


def field_rows(kind: type, records: Iterable[object], without: str = "") -> Iterator[Row]:
    """Yield the names of a dataclass's fields but one, and their values in each record."""
    names = [one.name for one in fields(kind) if one.name != without]
    yield names
    for record in records:
        yield [getattr(record, name) for name in names]


def _predict(inspector: Inspector, options: ViewOptions, _: Progress) -> ViewOutput:
    query = _single_query(View.predict, inspector, options)
    context = f"{query} {label(inspector.tokens[query], width=16)}"
    if options.sampling:
        return _sampled(inspector, options, query, context)
    report = inspector.predictions(query=query, top=options.top or 10)
    rows = ((one.id, one.text, one.probability, one.logit) for one in report)
    return ViewOutput(
        report,
        lambda screen: [prediction_table(report, context=context, width=screen.width)],
        [("id", "token", "probability", "logit"), *rows],
    )


def _sampled(inspector: Inspector, options: ViewOptions, query: int, context: str) -> ViewOutput:
    """Show the distribution before and after each sampler, with the settings of tgen generate."""
    sampling = SamplingConfig(**inspector.sampling_defaults | options.sampling)
    report = sampling_distribution(
        inspector.next_logits(query),
        inspector.ids[: query + 1],
        sampling,
        make_vocabulary(inspector.bundle),
        top=options.top or 10,
    )

    def rows() -> Iterator[Row]:
        names = [step.sampler for step in report.steps]
        yield "id", "token", "logit", "probability", *names, "removed_by", "final"
        for one in report.candidates:
            numbers = one.id, one.text, one.logit, one.probability, *one.after
            yield *numbers, one.removed_by, one.final

    return ViewOutput(
        report,
        lambda screen: distribution_table(report, sampling, context=context, width=screen.width),
        rows(),
    )


def _lens(inspector: Inspector, options: ViewOptions, _: Progress) -> ViewOutput:
    queries = _selected_queries(inspector, options) or range(len(inspector.ids))
    last = queries[-1]
    report = inspector.logit_lens(query=last, first=queries[0], last=last, top=options.top or 5)

    def rows() -> Iterator[Row]:
        yield "layer", "position", "id", "token", "probability"
        layers = zip(report.layers, report.top_ids, report.top_texts, strict=True)
        for (name, ids, texts), probabilities in zip(layers, report.top_probabilities, strict=True):
            cells = zip(ids, texts, probabilities.tolist(), strict=True)
            yield from ((name, position, *cell) for position, cell in enumerate(cells, queries[0]))

    return ViewOutput(
        report, lambda screen: lens_table(report, inspector.tokens, width=screen.width), rows()
    )


def _why(inspector: Inspector, options: ViewOptions, progress: Progress) -> ViewOutput:
    query = _single_query(View.why, inspector, options)
    keys = None if options.keys is None else parse_slice("--keys", options.keys, query + 1)
    with progress("leaving out one token at a time") as update:
        report = inspector.logit_attribution(
            query=query, target=_bytes(options.target), left_out=keys, progress=update
        )

    def rows() -> Iterator[Row]:
        names = ("position", "id", "token", "logit_without", "log_probability_without")
        yield "component", "layer", "head", "logit", *names
        for part in report.contributions:
            yield part.component, part.layer, part.head, part.logit, *5 * [None]
        for one in report.tokens:
            effects = one.logit_without, one.log_probability_without
            yield "token", None, None, one.logit, one.position, one.id, one.text, *effects

    token, top = inspector.tokens[query], options.top or 15
    return ViewOutput(
        report, lambda screen: attribution_table(report, token, top=top, width=screen.width), rows()
    )


def _ablation(inspector: Inspector, options: ViewOptions, progress: Progress) -> ViewOutput:
    with progress("ablating groups") as update:
        report = inspector.ablation(
            options.group, kind=options.ablate or "zero", top=options.top or 3, progress=update
        )

    def rows() -> Iterator[Row]:
        names = ("group", "loss", "cost", "divergence")
        yield *names, "id", "token", "probability", "logit"
        complete = [(("", report.loss, None, None), report.predictions)]
        groups = [([getattr(g, name) for name in names], g.predictions) for g in report.groups]
        for numbers, predictions in (*complete, *groups):
            for one in predictions:
                yield *numbers, one.id, one.text, one.probability, one.logit

    return ViewOutput(report, lambda _: ablation_table(report), rows())


def _patch(inspector: Inspector, options: ViewOptions, progress: Progress) -> ViewOutput:
    if options.patch is None:
        hint = "pass the other prompt, of as many tokens: --patch TEXT"
        raise UsageError("--view patch needs --patch", hint)
    query = _single_query(View.patch, inspector, options)
    tokens = inspector.tokens
    with progress("patching activations") as update:
        reports = inspector.patching(
            os.fsencode(options.patch),
            parts=options.parts,
            query=query,
            target=_bytes(options.target),
            contrast=_bytes(options.contrast),
            progress=update,
        )

    def maps() -> list[HeatMap]:
        return [patch_map(one, tokens) for one in reports]

    def rows() -> Iterator[Row]:
        yield "part", "layer", "position", "head", "token", "other_token", "score"
        for one in reports:
            for (layer, i), score in np.ndenumerate(one.scores):
                if one.part == "heads":
                    yield one.part, layer, None, i, None, None, float(score)
                else:
                    yield one.part, layer, i, None, tokens[i], one.other_tokens[i], float(score)

    layers = range(inspector.config.n_layers)
    return ViewOutput(reports, partial(_draw_maps, maps, layers, options), rows(), maps)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def _model(inspector: Inspector, _: ViewOptions, __: Progress) -> ViewOutput:
    return ViewOutput(inspector.summary, lambda _: summary_table(inspector.summary))


def _verify(inspector: Inspector, _: ViewOptions, __: Progress) -> ViewOutput:
    checks = inspector.verify()
    return ViewOutput(checks, lambda _: checks_table(checks))


def sources_output(report: SourcesReport, rows: Iterable[Row] = ()) -> ViewOutput:
    """Return the passages of a text in the training text as a view; the caller has that text."""
    return ViewOutput(report, lambda screen: sources_table(report, width=screen.width), rows)


def _selected_queries(inspector: Inspector, options: ViewOptions) -> range | None:
    """Return the positions of --query; None: all."""
    n = len(inspector.ids)
    return None if options.query is None else parse_slice("--query", options.query, n)


def _single_query(view: View, inspector: Inspector, options: ViewOptions) -> int:
    """Return the position of --query, by default the last one."""
    queries = _selected_queries(inspector, options) or range(len(inspector.ids))[-1:]
    if len(queries) > 1:
        raise UsageError(
            f"--query: --view {view} takes one position (got {len(queries)})",
            f"use, for example, --query {queries[-1]}",
        )
    return queries[0]


VIEWS: dict[View, Callable[[Inspector, ViewOptions, Progress], ViewOutput]] = {
    View.attention: _attention,
    View.heads: _heads,
    View.tokens: _tokens,
    View.predict: _predict,
    View.lens: _lens,
    View.why: _why,
    View.ablation: _ablation,
    View.patch: _patch,
    View.positions: _positions,
    View.rollout: _rollout,
    View.model: _model,
    View.verify: _verify,
}
