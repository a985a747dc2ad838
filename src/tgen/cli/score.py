"""`tgen score`: how well a model predicts texts, per token, document and in total."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tgen.cli import console
from tgen.cli.json_output import json_line
from tgen.cli.options import (
    engine_options,
    json_option,
    make_command,
    model_option,
    quiet_option,
    reading_options,
)
from tgen.config import EngineOptions
from tgen.config.input_files import Reading
from tgen.config.option import option
from tgen.drawing.colormap import MAX_BITS, highlight
from tgen.drawing.terminal_text import label, one_line
from tgen.errors import UsageError
from tgen.reports.number_format import count
from tgen.reports.score import DocumentReport, Score, ScoreDifference, TokenScore, TotalReport

if TYPE_CHECKING:
    from tgen.corpus import Corpus
    from tgen.loaded_model import LoadedModel


_Report = TokenScore | DocumentReport | TotalReport
_SCHEMA = "tgen.score/1"
_MAX_PERPLEXITY = 1e9  # larger ones do not fit into their column
_TOKENS = f"{'token':>8} {'id':>7} {'bits':>7} {'rank':>7}  text"
_ENDING = f"{'bytes':>13}  document"
_SCORES = f"{'bits/byte':>9} {'error':>7} {'perplexity':>13} {'tokens':>11} {_ENDING}"
_DIFFERENCES = f"{'bits/byte':>9} {'other':>7} {'difference':>10} {'error':>7} {'p':>7} {_ENDING}"


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The options of `tgen score`."""

    files: list[str] = option(
        default_factory=list,
        help_text="Files, directories, glob patterns, or - for stdin: texts, documents or rows "
        "(text, prompt and completion, or messages), also compressed.",
        argument=True,
        metavar="FILE",
    )
    reading: dict[str, Any] = reading_options()
    model: str | None = model_option()
    compare: str | None = model_option(
        help_text="Second model to score the same texts with; the difference is reported.",
        flags="--compare",
        shown_default="",
        excludes="per_token",
    )
    stride: int | None = option(
        None,
        "Number of tokens by which the context moves in texts that are longer than the context. A "
        "smaller number predicts tokens from more context, but takes more time.",
        "--stride",
        shown_default="half the context",
        low=1,
    )
    per_token: bool = option(
        False, "Write every token with its surprisal and rank.", "--per-token", panel="Output"
    )
    json: bool = json_option("Write one JSON object per line: per document, and the total.")
    quiet: bool = quiet_option()
    engine: EngineOptions = engine_options(
        dtype="Data type of the weights; int8 and int4 need a CPU.",
        cache_dtype="Data type of the KV cache, on a CPU.",
    )

    def __post_init__(self) -> None:
        if not self.files:
            raise UsageError("no text", "name a file, or - for stdin")


def score(options: ScoreOptions) -> None:
    """Measure how well a model predicts texts: bits per byte and perplexity.

    Bits per byte can be compared across models, perplexities only across models with the same
    tokenizer. A document is a file, a part of a file delimited by <|endoftext|>, or a row. In
    prompt/completion rows, only completions are scored; in messages rows, only the assistant's
    messages. Documents are scored separately, each after the model's beginning-of-text or
    end-of-text token. The model's chat template renders messages.

    The standard error treats documents as independent samples or, if there are fewer than 10,
    blocks of their text that are at least as long as the context. With --compare, p is the
    probability that equally good models differ at least this much (paired permutation test).

    docs/formats.md lists the JSON fields.
    """
    from tgen.checkpoint.model_lookup import find_model

    names = [options.model] if options.compare is None else [options.model, options.compare]
    paths = [find_model(name).path for name in names]
    corpus = read_texts(options.files, Reading(**options.reading))
    models = [_load_model(path, options) for path in paths]
    _score(models, corpus, options)


def read_texts(paths: Sequence[str], reading: Reading) -> "Corpus":
    """Read the texts to score."""
    from tgen.corpus import read
    from tgen.runs.output_folder import own_files

    hint = "score one after the other"
    with console.late_progress("reading") as update:
        corpus = read(paths, update, own_files=own_files, mixed_hint=hint, reading=reading)
    for note in corpus.notes:
        console.print_status(f"note: {note}")
    return corpus


def _load_model(path: Path, options: ScoreOptions) -> "LoadedModel":
    from tgen.cli.model_loading import load_model

    model = load_model(path, options.engine)
    length = model.engine.context_length
    if options.stride is not None and options.stride > length:
        message = f"--stride: {options.stride:,} is more than the context of {path} ({length:,})"
        raise UsageError(message, f"set --stride to {length} or less")
    return model


def _score(models: "list[LoadedModel]", corpus: "Corpus", options: ScoreOptions) -> None:
    """Write the reports as they are computed."""
    from tgen.scoring import score_documents

    settings = [_settings(model, options, chat=corpus.is_chat) for model in models]
    for setting in settings:
        _print_settings(setting, chat=corpus.is_chat)
    writer: _JsonWriter | _TableWriter
    if options.json:
        others = {"compare": settings[1]} if len(models) == 2 else {}
        writer = _JsonWriter(settings[0] | others)
    else:
        writer = _TableWriter([setting["model"] for setting in settings])
    n_lines = 2 if options.per_token else len(corpus.documents)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    late: list[_Report] = []  # a bar would mix with lines
    with console.progress("scoring", hidden=on_terminal and n_lines > 1) as bar:
        for report in score_documents(
            models,
            corpus.documents,
            chat=corpus.is_chat,
            stride=options.stride,
            with_tokens=options.per_token,
            progress=bar,
        ):
            if isinstance(report, TotalReport):
                corpus.close()  # raises CorpusError if a file has changed
            if on_terminal and n_lines == 1:
                late.append(report)
            else:
                writer.write(report)
    for one in late:
        writer.write(one)
    assert isinstance(report, TotalReport)
    _print_notes(report, json=options.json)


def _settings(model: "LoadedModel", options: ScoreOptions, *, chat: bool) -> dict[str, Any]:
    """Return a model's name, and how it scores."""
    from tgen.generation.sequence import default_stride
    from tgen.scoring import start_ids

    length = model.engine.context_length
    return {
        "model": str(model.bundle.named_path),
        "dtype": model.engine.dtype,
        "context_length": length,
        "stride": options.stride or default_stride(length),
        "start_ids": [] if chat else start_ids(model),
    }


class _TableWriter:
    """Writes aligned columns to stdout, each line as soon as it is computed."""

    def __init__(self, names: list[str]) -> None:
        """`names` are those of the one or two models."""
        self._names = names
        self._has_color = console.has_color_ramp()
        self._header = ""  # of the last line

    def write(self, report: _Report) -> None:
        """Write a token, a document, or the total of several documents."""
        if isinstance(report, TokenScore):
            self._write_token(report)
        elif isinstance(report, DocumentReport):
            self._write_scores(report, report.name)
        elif report.n_documents > 1:
            self._write_scores(report, f"total of {count(report.n_documents, 'document')}")
        if isinstance(report, TotalReport) and report.difference is not None:
            self._show(Text(one_line(_verdict(report.difference, *self._names))))

    def _write_token(self, token: TokenScore) -> None:
        bits = -token.logprob / math.log(2)
        line = Text(f"{token.position:>8} {token.id:>7} {bits:>7.2f} {token.rank:>7,}  ")
        style = highlight(bits / MAX_BITS) if self._has_color else ""
        self._show(line.append(label(token.text), style), header=_TOKENS)

    def _write_scores(self, report: DocumentReport | TotalReport, name: str) -> None:
        score, other, difference = report.score, report.other, report.difference
        cells = [f"{_bits(score.bits_per_byte):>9}"]
        if other is None:
            cells += [f"{_bits(score.standard_error):>7}", f"{_perplexity(score.perplexity):>13}"]
            cells += [f"{score.n_tokens:>11,}"]
        else:
            cells += [f"{_bits(other.bits_per_byte):>7}"]
            size = error = p_value = None
            if difference is not None:
                size, error = difference.bits_per_byte, difference.standard_error
                p_value = difference.p_value
            cells += [f"{_bits(size, '+'):>10}", f"{_bits(error):>7}", f"{_p_value(p_value):>7}"]
        line = Text(" ".join([*cells, f"{score.n_bytes:>13,}  {one_line(name)}"]))
        self._show(line, header=_SCORES if other is None else _DIFFERENCES)

    def _show(self, line: Text, *, header: str = "") -> None:
        if header and header != self._header:
            console.show(Text(header, style="bold"), wrap=False)
            self._header = header
        console.show(line, wrap=False)


class _JsonWriter:
    """Writes one JSON object per line to stdout; docs/formats.md lists the fields."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings` are fields of the total."""
        self._settings = settings
        self._n_documents = 0

    def write(self, report: _Report) -> None:
        """Write a token, a document or the total."""
        from tgen.reports.json_text import json_value  # imports NumPy, which help does not need

        if isinstance(report, TokenScore):
            self._write("token", {"document": self._n_documents} | json_value(report))
        elif isinstance(report, DocumentReport):
            names = {"document": self._n_documents, "name": report.name}
            self._write("document", names | _fields(report))
            self._n_documents += 1
        else:
            counts = ("n_documents", "n_replaced", "n_normalized", "n_cut")
            counted = {name: getattr(report, name) for name in counts}
            self._write("total", counted | _fields(report) | self._settings)

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        from tgen.reports.json_text import json_value

        console.write(json_line({"schema": _SCHEMA, "kind": kind} | json_value(fields)))


def _fields(report: DocumentReport | TotalReport) -> dict[str, Any]:
    fields = _score_fields(report.score)
    if report.other is not None:
        fields |= {"other": _score_fields(report.other), "difference": report.difference}
    return fields


def _score_fields(score: Score) -> dict[str, Any]:
    ratios = {"bits_per_byte": score.bits_per_byte, "perplexity": score.perplexity}
    return ratios | asdict(score)


def _print_settings(settings: Mapping[str, Any], *, chat: bool) -> None:
    """Print a model, and from what its tokens are predicted."""
    length, stride = settings["context_length"], settings["stride"]
    line = f"{settings['model']} · context {length:,}"
    if chat:
        line += ": scores the answers of conversations, which its chat template renders"
    else:
        line += (
            f", stride {stride:,}: in long documents, tokens are predicted from "
            f"{length - stride + 1:,} to {length:,} tokens"
        )
        if not settings["start_ids"]:
            line += "; the first token is not scored"
    console.print_status(line)


def _print_notes(total: TotalReport, *, json: bool) -> None:
    """Print how the errors were computed, unless they are in JSON, and what differs between the
    text and what was scored."""
    one = total.difference or total.score
    units = count(one.n_units, one.unit[:-1])
    if one.standard_error is None:
        note = f"no standard errors: {units} of text, less than 10"
    elif total.difference is not None:
        note = f"columns error and p: of the difference in bits/byte, from {units}"
    else:
        note = f"column error: standard error of bits/byte, from {units}"
    if not json:
        console.print_status(note)
    if total.n_replaced:
        console.print_status(
            f"warning: {count(total.n_replaced, 'character')} that a tokenizer cannot express "
            "replaced by U+FFFD",
        )
    if total.n_cut:
        console.print_status(
            f"warning: some answers of {count(total.n_cut, 'row')} are not scored: too long for "
            "the context",
        )
    if total.n_normalized:
        documents = count(total.n_normalized, "document")
        console.print_status(
            f"warning: a tokenizer changes the text of {documents} (normalization): other text is "
            "scored, with the bytes of the original",
        )


def _verdict(one: ScoreDifference, name: str, other: str) -> str:
    """Return which model predicts the text better, as a sentence."""
    if one.bits_per_byte == 0:
        return "no difference"
    better, worse = (name, other) if one.bits_per_byte < 0 else (other, name)
    size = f"{abs(one.bits_per_byte):.4f}"
    if one.standard_error is None or one.p_value is None:
        return f"{better} is better by {size} bits/byte; too little text for a test"
    comparison = "p " if one.p_value < 0.001 else "p = "
    size += f" ± {one.standard_error:.4f} bits/byte ({comparison}{_p_value(one.p_value)})"
    if not one.is_significant:
        return f"no significant difference: {size}"
    return f"{better} is better than {worse} by {size}"


def _bits(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.4f}"


def _perplexity(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if value < _MAX_PERPLEXITY else f"{value:.2e}"


def _p_value(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


command = make_command(score, ScoreOptions)
