"""Rich tables without lines: numbers are never cut, text is folded where it must be.

They show the configuration and parameters of a model, self-checks, next-token predictions, the
logit lens, logit attribution, and a text's tokens with their surprisal.
"""

import math
from collections.abc import Sequence
from typing import Any

from rich.cells import set_cell_size
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tgen.config import SamplingConfig
from tgen.config.index_ranges import name_layers
from tgen.drawing.colormap import MAX_BITS, highlight
from tgen.drawing.terminal_text import cut, label, one_line
from tgen.reports.generation import SamplingDistribution
from tgen.reports.inspection import (
    AblationReport,
    AttributionReport,
    Check,
    LensReport,
    ModelSummary,
    Prediction,
    SourcesReport,
    TextReport,
    TokenContribution,
    TokenReport,
)
from tgen.reports.number_format import MIB, count

_PLACEMENTS = {
    "pre": "before each sublayer (pre-norm)",
    "post": "after each residual addition (post-norm)",
    "parallel": "before attention and feed-forward, which run in parallel",
    "shared": "before attention and feed-forward, which run in parallel (one norm for both)",
    "output": "on each sublayer's output",
    "sandwich": "before each sublayer and on its output",
}
_NORM_PARAMETERS = {"all": "", "weight": " (without bias)", "none": " (without parameters)"}
_SCALES = {
    "embedding {:.6g}": ("embedding_scale", 1),
    "attention {:.6g}": ("attention_scale", None),
    "residual {:.6g}": ("residual_scale", 1),
    "logits 1/{:.6g}": ("logits_divisor", 1),
}
_MAX_BAR = 30  # columns of the longest bar
_TEXT_COLUMNS = 50  # columns left of the bars
_CANDIDATE_COLUMNS = 50  # columns of a candidate beside its probabilities after samplers
_TOKEN_COLUMNS = 65  # columns of an earlier token beside its bar
_LAYER_COLUMNS = 10
_SOURCE_COLUMNS = 56  # columns of passages, numbers and places
_MIN_CONTEXT = 12  # columns on each side of a passage
_MIN_CELL, _MAX_CELL = 9, 18  # columns per position
_MIN_WIDTH = 60  # columns; narrower tables have no token ids and byte offsets


def table(*names: str, title: str = "") -> Table:
    """Return a table with these columns; `>` before a name right-aligns the column."""
    rows = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
    )
    for name in names:
        if name.startswith(">"):
            rows.add_column(name[1:], justify="right", no_wrap=True)
        else:
            rows.add_column(name, overflow="fold")
    return rows


def summary_table(summary: ModelSummary) -> list[Table | Text]:
    """Return the configuration as text, and a table of the parameters."""
    config = summary.config
    rows = table("parameter", "shape", ">count", "dtype")
    groups: dict[str, list[tuple[list[int], int, str]]] = {}  # one per name inside the blocks
    for name, shape, n, dtype in summary.parameters:
        parts = name.split(".")
        group = f"blocks · {'.'.join(parts[2:])}" if parts[0] == "blocks" else name
        groups.setdefault(group, []).append((shape, n, dtype))
    for group, tensors in groups.items():
        size = " x ".join(map(str, tensors[0][0]))
        times = f"{len(tensors)} of " if len(tensors) > 1 else ""
        dtypes = ", ".join(sorted({dtype for _, _, dtype in tensors}))
        rows.add_row(group, times + size, f"{sum(n for _, n, _ in tensors):,}", dtypes)
    if config["tied_embeddings"]:
        rows.add_row("lm_head", "tied to token_embedding", "0", "")
    rows.add_row("total", "", f"{summary.n_parameters:,}", "", style="bold")
    rule = f" ({summary.found_by})" if summary.found_by else ""
    text = (
        f"{summary.path}{rule}\n"
        f"{summary.family}: layers {config['n_layers']}, heads {config['n_heads']} "
        f"(key/value heads {config['n_kv_heads']}), d_model {config['d_model']}, "
        f"d_ff {config['d_ff']}, vocabulary {config['vocab_size']:,}, "
        f"context {config['context_length']:,}\n"
        f"{'; '.join(_architecture(config))}\n"
        f"{summary.weight_bytes / MIB:.1f} MiB of weights, {summary.cache_bytes_per_token:,} "
        "bytes of KV cache per token, "
        f"{summary.attention_bytes / MIB:.1f} MiB for one layer's attention weights over a full "
        "context (computed only for inspection)"
    )
    return [Text(text), Text(), rows]


def _architecture(config: dict[str, Any]) -> list[str]:
    """Return the choices that a family or its configuration makes, one phrase per subject."""
    norm = f"{config['norm']} {_PLACEMENTS[config['norm_placement']]}"
    norm += " (multiplies by 1 + weight)" * config["norm_adds_one"]
    norm += _NORM_PARAMETERS[config["norm_parameters"]]
    phrases = [_positions(config), norm, config["activation"]]
    if config["qk_norm"]:
        over = " over all heads" * config["qk_norm_over_heads"]
        over += " after the rotation" * config["qk_norm_after_rope"]
        phrases.append(f"query and key norm{over}")
    if window := config["sliding_window"]:
        phrases.append(f"sliding window of {window:,} tokens{_where(config['sliding_layers'])}")
    scales = [
        name.format(config[field])
        for name, (field, default) in _SCALES.items()
        if config[field] != default
    ]
    return [*phrases, f"scale factors: {', '.join(scales)}"] if scales else phrases


def _positions(config: dict[str, Any]) -> str:
    """Return the position encoding; for RoPE its base, scaling, dimensions and layers."""
    if config["position"] != "rotary":
        return f"{config['position']} positions"
    details = [f"base {config['rope_theta']:,.10g}"]
    if config["local_rope_theta"] is not None:
        details.append(f"{config['local_rope_theta']:,.10g} in layers with a sliding window")
    if config["rope_scaling"]:
        details.append(f"{config['rope_scaling']['kind']} scaling")
    if config["rotary_dim"] not in (None, config["head_dim"]):
        details.append(f"{config['rotary_dim']} of {config['head_dim']} dimensions")
    return f"rotary positions ({', '.join(details)}){_where(config['rope_layers'])}"


def _where(layers: Sequence[bool] | None) -> str:
    """Return the layers that have a property, or nothing if all do."""
    if layers is None or all(layers):
        return ""
    chosen = [i for i, has in enumerate(layers) if has]
    return f" in {name_layers(chosen)}" if chosen else " in no layer"


def checks_table(checks: Sequence[Check]) -> list[Table | Text]:
    """Return one row per check, and the verdict."""
    rows = table("check", ">error", ">limit", "")
    for check in checks:
        verdict = Text("passed") if check.passed else Text("FAILED", style="bold red")
        rows.add_row(check.name, f"{check.value:.1e}", f"{check.limit:.0e}", verdict)
    n = sum(not check.passed for check in checks)
    return [rows, Text(f"{n} of {len(checks)} checks failed" if n else "all checks passed")]


def checks_footer(checks: Sequence[Check]) -> Text:
    """Return the line that ends every view of a text."""
    failed = [f"{check.name}: error {check.value:.0e}" for check in checks if not check.passed]
    if failed:
        text = f"SELF-CHECK FAILED: {'; '.join(failed)}; see --view verify"
        return Text(text, style="bold red")
    names = "; ".join(f"{check.name} (error {check.value:.0e})" for check in checks)
    return Text(f"self-check passed: {names}", style="dim")


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


def distribution_table(
    report: SamplingDistribution, sampling: SamplingConfig, *, context: str, width: int
) -> list[Table | Text]:
    """Return the candidates with their probability before and after each sampler, and what each
    sampler removed. Without room, only the first and the last probabilities are shown."""
    steps = report.steps
    columns = [f">{step.sampler}" for step in steps]
    room = width - _CANDIDATE_COLUMNS
    hidden = len(columns) > 1 and sum(map(len, columns)) + len(columns) > room
    shown = slice(-1, None) if hidden else slice(None)
    title = f"next token after {context}: probability before and after each sampler"
    names = ["token", ">id", ">logit", ">model", *columns[shown], ""]
    if hidden:
        names[-2] = ">sampled"
    rows = table(*names)
    bar = min(max(room - sum(map(len, columns[shown])) - len(columns[shown]), 0), _MAX_BAR)
    for one in report.candidates:
        cells = [f"{p:.1%}" if p else "–" for p in one.after[shown]]
        rows.add_row(
            Text(label(one.text, width=20)),
            str(one.id),
            f"{one.logit:.2f}",
            f"{one.probability:.1%}",
            *cells,
            "█" * round(one.final * bar)
            or (f"removed by {one.removed_by}" if not one.final else ""),
        )
    lines: list[Table | Text] = [Text(title, style="italic"), rows, Text()]
    for step in steps:
        value = getattr(sampling, step.sampler, "")
        if step.sampler == "xtc":
            value = f"{sampling.xtc_threshold:g}, acts in {sampling.xtc_probability:.0%} of draws"
        elif isinstance(value, float):
            value = f"{value:g}"
        effect = "removes no token"
        if step.candidates:
            effect = (
                f"removes {count(step.candidates, 'token')} (probability {step.probability:.1%}), "
                f"leaves {step.left:,}"
            )
        lines.append(Text(f"{step.sampler} {value}".rstrip() + f": {effect}", style="dim"))
    if hidden:
        note = "this width has no room for the probabilities between the samplers: see --csv"
        lines.append(Text(note, style="dim"))
    return lines


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


def ablation_table(report: AblationReport) -> list[Table | Text]:
    """Return the loss and the next tokens of the complete model and without each group."""
    rows = table("without", ">loss", ">Δloss", ">KL", "next token")

    def add(name: str, loss: float, numbers: Sequence[str], predictions: list[Prediction]) -> None:
        tokens = "  ".join(f"{label(one.text)} {one.probability:.1%}" for one in predictions)
        rows.add_row(Text(name), f"{loss:.3f}", *numbers, Text(tokens))

    add("(complete)", report.loss, ("", ""), report.predictions)
    for one in report.groups:
        numbers = (f"{one.cost:+z.3f}", f"{one.divergence:z.3f}")
        add(one.group, one.loss, numbers, one.predictions)
    replaced = "their mean over the text" if report.kind == "mean" else "zero"
    note = (
        f"loss of the text in nats/token, with the outputs of each group replaced by {replaced}; "
        "KL: divergence of the next token's distribution from the complete model's, in nats"
    )
    return [rows, Text(note, style="dim")]


def attribution_table(
    report: AttributionReport, token: bytes, *, top: int, width: int
) -> list[Table | Text]:
    """Return the contributions of earlier tokens to a logit, and the largest contributions of
    components with the sum of the others."""
    probability = math.exp(report.log_probability)
    n = len(report.targets)
    sums = f", summed over {n} tokens" if n > 1 else ""
    title = Text(
        f"logit of {label(report.target_text, width=16)} after {report.query} "
        f"{label(token, width=16)}: {report.logit:.2f}{sums} (probability {_percent(probability)})",
        style="italic",
    )
    lines = [title, *_token_rows(report, top=top, width=width)]
    if report.difference is None:
        note = (
            "a post-norm model has no residual stream: its logit cannot be split into contributions"
        )
        return [*lines, Text(note, style="dim")]
    rows = table("component", ">contribution", "")
    largest = max((abs(part.logit) for part in report.contributions), default=1.0) or 1.0
    for part in report.contributions[:top]:
        length = round(abs(part.logit) / largest * _bar_columns(width))
        bar = ("█" if part.logit >= 0 else "░") * length
        rows.add_row(part.component, f"{part.logit:+z.2f}", bar)
    others = report.contributions[top:]
    if others:
        rows.add_row(
            count(len(others), "other"),
            f"{sum(part.logit for part in others):+z.2f}",
            "",
            style="dim",
        )
    norms = "the final norm's scale is"
    if report.normalizes_outputs:
        norms = "the scales of the final norm and of the norms on outputs are"
    note = (
        f"all {len(report.contributions)} contributions sum to the logit (error "
        f"{report.difference:.0e}); {norms} held constant"
    )
    return [*lines, Text(), rows, Text(note, style="dim")]


def _token_rows(report: AttributionReport, *, top: int, width: int) -> list[Table | Text]:
    """Return the tokens whose absence changes the log-probability most, in order of position."""
    has_run = any(one.log_probability_without is not None for one in report.tokens)

    def effect(one: TokenContribution) -> float:
        if not has_run:
            return one.logit or 0.0
        without = one.log_probability_without
        return 0.0 if without is None else report.log_probability - without

    largest_first = sorted(report.tokens, key=lambda one: -abs(effect(one)))
    shown = sorted(largest_first[:top], key=lambda one: one.position)
    has_parts = report.difference is not None
    parts = [">attention"] if has_parts else []
    rows = table(">", "token", *parts, ">logit without", ">p without", "")
    scale = min(max(width - _TOKEN_COLUMNS, 0), _MAX_BAR) / (abs(effect(largest_first[0])) or 1.0)
    for one in shown:
        rows.add_row(
            str(one.position),
            Text(label(one.text, width=20)),
            *([f"{one.logit:+z.2f}"] if has_parts else []),
            "–" if one.logit_without is None else f"{one.logit_without:.2f}",
            "–"
            if one.log_probability_without is None
            else _percent(math.exp(one.log_probability_without)),
            ("█" if effect(one) >= 0 else "░") * round(abs(effect(one)) * scale),
        )
    if others := [one.logit or 0.0 for one in report.tokens if one not in shown]:
        parts_of_others = [f"{sum(others):+z.2f}"] if has_parts else []
        rows.add_row("", count(len(others), "other"), *parts_of_others, style="dim")
    if has_parts:
        names = {"embedding": "own embedding", "feed_forward": "feed-forward", "biases": "biases"}
        for field, name in names.items():
            rows.add_row("", name, f"{getattr(report, field):+z.2f}", style="dim")
    note = (
        "without: logit and probability of the model run on the text without the token; bars: its "
        "effect on the log-probability"
    )
    if has_parts:
        note = f"attention: the token's part of the logit through all heads; {note}"
    return [rows, Text(note, style="dim")]


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.0005 else f"{probability:.2g}"


def token_table(
    report: TextReport, *, rows: range, width: int, has_color: bool
) -> list[Table | Text]:
    """Return the text colored by surprisal, and a table with one row per token."""
    strip = Text()
    for token in report.tokens:
        strip.append(label(token.text), _surprisal_style(token))
        if b"\n" in token.text:
            strip.append("\n")
    wide = width >= _MIN_WIDTH
    numbers = [">token", ">id", ">byte"] if wide else [">"]
    columns = table(*numbers, "text", ">bits", ">rank", "predicted", ">")
    for i in rows:
        columns.add_row(*_row(report.tokens[i], wide=wide))
    color = "lighter colors: higher surprisal; " if has_color else ""
    notes = [f"{color}bits: surprisal, -log2 p(token); rank 0: the most likely token"]
    if len(rows) < len(report.tokens):
        which = f"tokens {rows.start} to {rows[-1]}" if len(rows) > 1 else f"token {rows.start}"
        notes.append(f"{which} of {len(report.tokens)}; --query selects others")
    if report.nats_per_token is not None and report.perplexity is not None:
        per_byte = report.bits_per_byte
        bits = "" if per_byte is None else f" · {per_byte:.3f} bits/byte"
        notes.append(
            f"{len(report.tokens)} tokens, {report.n_bytes} bytes · {report.nats_per_token:.3f} "
            f"nats/token · perplexity {report.perplexity:,.5g}{bits} (without the first token)"
        )
    return [strip, Text(), columns, *(Text(note, style="dim") for note in notes)]


def _row(token: TokenReport, *, wide: bool) -> list[str | Text]:
    bits, rank = token.surprisal, token.rank
    top_probability = token.top_probability
    return [
        str(token.index),
        *([str(token.id), str(token.byte_offset)] if wide else []),
        Text(label(token.text, width=20) + _partial_character(token.text)),
        Text("–") if bits is None else Text(f"{bits:.1f}", _surprisal_style(token)),
        "–" if rank is None else f"{rank:,}",
        Text("" if token.top_text is None else label(token.top_text, width=16)),
        "" if top_probability is None else f"{top_probability:.0%}",
    ]


def _partial_character(token: bytes) -> str:
    """Return a note for tokens that are not whole characters."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return f" {count(len(token), 'byte')} of a character"
    return ""


def _surprisal_style(token: TokenReport) -> Style:
    if token.surprisal is None:
        return Style()
    return highlight(token.surprisal / MAX_BITS)


def sources_table(report: SourcesReport, *, width: int) -> list[Table | Text]:
    """Return one row per place of each passage, with the text around it."""
    rows = table("passage", ">occurrences", "file", ">line", "context")
    room = max(_MIN_CONTEXT, (width - _SOURCE_COLUMNS) // 2)
    for passage in report.passages:
        text, n = _readable(passage.text), f"{passage.occurrences:,}"
        for place in passage.places:
            after = cut(_readable(place.after), room)
            around = f"{_readable(place.before)[-room:]}[…]{after}"
            where = Text(_readable(place.file.encode(errors="replace"))), str(place.line)
            rows.add_row(Text(text), n, *where, Text(around.strip(), style="dim"))
            text = n = ""
    listed, found = len(report.passages), count(report.n_passages, "passage")
    which = found if listed == report.n_passages else f"the longest {listed} of {found}"
    note = (
        f"{which} in the training text ({report.corpus_bytes:,} bytes): {report.n_covered:,} of "
        f"{count(report.n_bytes, 'byte')}"
    )
    if not listed:
        note = f"no word of this text is in the training text ({report.corpus_bytes:,} bytes)"
    return [*([rows] if listed else []), Text(note, style="dim")]


def _readable(text: bytes) -> str:
    return one_line(text.decode(errors="replace")).replace("\t", " ")
