"""`tgen score`: how well a model predicts texts, per token, document and in total."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.options import (
    engine_options,
    json_option,
    make_command,
    model_option,
    quiet_option,
    reading_options,
)
from tgen.config import EngineOptions
from tgen.config.option import option
from tgen.config.reading import PANEL, Reading
from tgen.errors import UsageError
from tgen.reports.score import DocumentReport, TokenScore, TotalReport

if TYPE_CHECKING:
    from tgen.corpus import Corpus
    from tgen.loaded_model import LoadedModel


PANELS = (PANEL, "Output", "Performance")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The options of `tgen score`."""

    files: list[str] = option(
        default_factory=list,
        help_text="Files, directories, glob patterns, or - for stdin: texts, documents, or rows of "
        "texts, of prompts and answers or of messages; also compressed.",
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
        dtype="Data type of the weights in memory, on a CPU.",
        cache_dtype="Data type of the KV cache, on a CPU.",
    )

    def __post_init__(self) -> None:
        if not self.files:
            raise UsageError("no text", "name a file, or - for stdin")


def score(options: ScoreOptions) -> None:
    """Measure how well a model predicts texts: bits per byte and perplexity.

    Bits per byte can be compared across models, perplexities only across models with the same
    tokenizer. A document is a file, a part of a file delimited by <|endoftext|>, or a row of a
    .jsonl file. In prompt/completion rows, only completions are scored; in messages rows, only the
    assistant's messages. Documents are scored separately, each after the model's beginning-of-text
    or end-of-text token. The model's chat template renders messages.

    The standard error treats documents as independent samples or, if there are fewer than 10,
    blocks of their text that are at least as long as the context. With --compare, p is the
    probability that equally good models differ at least this much (paired permutation test).

    docs/formats.md lists the JSON fields.
    """
    from tgen.checkpoint.model_lookup import find_model
    from tgen.corpus import read
    from tgen.runs.output_folder import own_files

    names = [options.model] if options.compare is None else [options.model, options.compare]
    paths = [find_model(name).path for name in names]
    corpus = read(
        options.files,
        own_files=own_files,
        mixed_hint="score one after the other",
        reading=Reading(**options.reading),
    )
    for note in corpus.notes:
        console.print_status(f"note: {note}", quiet=options.quiet)
    models = [_load_model(path, options) for path in paths]
    _score(models, corpus, options)


def _load_model(path: Path, options: ScoreOptions) -> "LoadedModel":
    from tgen.cli.model_loading import load_model

    model = load_model(path, options.engine, quiet=options.quiet)
    length = model.engine.context_length
    if options.stride is not None and options.stride > length:
        message = f"--stride: {options.stride:,} is more than the context of {path} ({length:,})"
        raise UsageError(message, f"set --stride to {length} or less")
    return model


def _score(models: "list[LoadedModel]", corpus: "Corpus", options: ScoreOptions) -> None:
    """Write the reports as they are computed."""
    from tgen.cli.score_output import JsonWriter, TableWriter, print_notes, print_settings
    from tgen.scoring import score_documents

    settings = [_settings(model, options, chat=corpus.is_chat) for model in models]
    for setting in settings:
        print_settings(setting, chat=corpus.is_chat, quiet=options.quiet)
    writer: JsonWriter | TableWriter
    if options.json:
        others = {"compare": settings[1]} if len(models) == 2 else {}
        writer = JsonWriter(settings[0] | others)
    else:
        writer = TableWriter([setting["model"] for setting in settings])
    n_lines = 2 if options.per_token else len(corpus.documents)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    late: list[TokenScore | DocumentReport | TotalReport] = []  # a bar would mix with lines
    with console.progress("scoring", quiet=options.quiet or (on_terminal and n_lines > 1)) as bar:
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
    print_notes(report, json=options.json, quiet=options.quiet)


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


command = make_command(score, ScoreOptions, PANELS)
