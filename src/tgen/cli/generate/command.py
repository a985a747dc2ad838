"""`tgen generate`: text goes to stdout as it comes, everything else to stderr."""

import secrets
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tgen.cli import console
from tgen.cli.generate import sampling_options as steer
from tgen.cli.generate.batch import MAX_SAMPLES, RequestQueue, Writer
from tgen.cli.generate.chat import chat_loop, initial_messages
from tgen.cli.generate.conflicts import check_together
from tgen.cli.generate.distributed import GatherWriter, join_ranks, load_shared
from tgen.cli.generate.input_rows import Generation
from tgen.cli.generate.line_reader import LineReader
from tgen.cli.generate.output import (
    JsonWriter,
    TextWriter,
    error_record,
    json_line,
    record,
    text_line,
)
from tgen.cli.options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PromptOption,
    QuietOption,
    ThreadsOption,
    WeightsOption,
    read_prompt,
)
from tgen.config import DEFAULT_BATCH_SIZE, Draft
from tgen.distributed import Ranks, broadcast
from tgen.reports import Token

if TYPE_CHECKING:
    from tgen.api import Model
    from tgen.engine.base import PromptCache

_DEFAULT = steer.DEFAULT


def generate(
    context: typer.Context,
    prompt: PromptOption = None,
    model: ModelOption = None,
    max_new_tokens: steer.MaxNewTokens = _DEFAULT.max_new_tokens,
    seed: steer.Seed = None,
    overflow: steer.OverflowOption = _DEFAULT.overflow,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt, by the model's chat template.")
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", show_default=False, help="What a chat begins with."
        ),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", min=1, max=MAX_SAMPLES, help="How many texts to write for each prompt."
        ),
    ] = 1,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            show_default=False,
            help="A prompt a line, or JSON objects with fields of their own; '-' reads stdin.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="How many texts are computed together.")
    ] = DEFAULT_BATCH_SIZE,
    json_output: JsonOption = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Write a JSON object a text, on a line each.")
    ] = False,
    logprobs: steer.Logprobs = _DEFAULT.logprobs,
    explain: steer.Explain = _DEFAULT.explain,
    stats: Annotated[
        bool, typer.Option("--stats", help="How long the first token took, and the rates.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Line after line, at a terminal.")
    ] = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    weights: WeightsOption = None,
    no_kv_cache: Annotated[
        bool, typer.Option("--no-kv-cache", help="Compute the whole text again for every token.")
    ] = False,
    draft: Annotated[
        Draft,
        typer.Option("--draft", help="Guess ahead and check, where faster; the text is the same."),
    ] = "auto",
    save_cache: Annotated[
        Path | None,
        typer.Option(
            "--save-cache",
            metavar="FILE",
            help="Keep what is computed of the prompt, for this model and these --weights.",
        ),
    ] = None,
    load_cache: Annotated[
        Path | None,
        typer.Option(
            "--load-cache",
            metavar="FILE",
            help="Take the prompt's beginning from a file that --save-cache wrote.",
        ),
    ] = None,
    temperature: steer.Temperature = _DEFAULT.temperature,
    top_k: steer.TopK = _DEFAULT.top_k,
    top_p: steer.TopP = _DEFAULT.top_p,
    min_p: steer.MinP = _DEFAULT.min_p,
    typical_p: steer.TypicalP = _DEFAULT.typical_p,
    top_n_sigma: steer.TopNSigma = _DEFAULT.top_n_sigma,
    xtc_probability: steer.XtcProbability = _DEFAULT.xtc_probability,
    xtc_threshold: steer.XtcThreshold = _DEFAULT.xtc_threshold,
    samplers: steer.Samplers = steer.SAMPLERS_TEXT,
    repetition_penalty: steer.RepetitionPenalty = _DEFAULT.repetition_penalty,
    presence_penalty: steer.PresencePenalty = _DEFAULT.presence_penalty,
    frequency_penalty: steer.FrequencyPenalty = _DEFAULT.frequency_penalty,
    penalty_window: steer.PenaltyWindow = _DEFAULT.penalty_window,
    penalize_prompt: steer.PenalizePrompt = _DEFAULT.penalize_prompt,
    no_repeat_ngram: steer.NoRepeatNgram = _DEFAULT.no_repeat_ngram,
    dry_multiplier: steer.DryMultiplier = _DEFAULT.dry_multiplier,
    dry_base: steer.DryBase = _DEFAULT.dry_base,
    dry_allowed_length: steer.DryAllowedLength = _DEFAULT.dry_allowed_length,
    dry_breakers: steer.DryBreakers = None,
    stop: steer.Stop = None,
    until_newline: steer.UntilNewline = _DEFAULT.until_newline,
    ban: steer.Ban = None,
    require: steer.Require = None,
    bias: steer.Bias = None,
    choices: steer.Choices = None,
    regex: steer.RegexOption = None,
    json_schema: steer.JsonSchema = None,
) -> None:
    """Continue a text.

    The continuation goes to stdout and not one byte more; the model's name, the seed and the speed
    go to stderr. Texts of --input and --samples end with a line break each; --jsonl keeps theirs
    apart from it. docs/formats.md has the fields of JSON, in and out. Under torchrun its ranks
    share the rows of --input out; rank 0 writes all of them, the bytes that one process writes.

    With --chat the prompt is what a user says; what it spells is never a control token. The answer
    ends where the model's turn does, and with --interactive each line is a turn.

    What the model says goes through the penalties, then --bias, --ban, --require and the given
    form, then the samplers in the order of --samplers; one of the tokens left is drawn. DRY takes
    multiplier * base^(n - allowed length) from what would make a repeat of n tokens longer. Strings
    are matched on bytes, wherever tokens begin and end. Of an option given twice, unless it is
    repeatable, the last counts.

    A text of a given form ends where nothing can follow; where it may end and may go on, as `a` of
    the choices a and ab, the model decides, by its end-of-text token.

    Exit status 1 also where a row of --input was wrong, or a text is not of the given form because
    it was cut off.
    """

    given = context.params
    check_together(given)
    with join_ranks(given) as ranks:
        failed = _generated(context, given, ranks)
    if failed:
        raise typer.Exit(1)


def _generated(context: typer.Context, given: dict[str, Any], ranks: Ranks) -> bool:
    """Writes what was asked for; whether a row was wrong, or a text is not of its form."""
    from tgen.checkpoint.hf import generation_config
    from tgen.checkpoint.model_lookup import find_model

    quiet = given["quiet"] or ranks.rank > 0
    path = find_model(given["model"]).path
    advised, said = steer.advised(context, generation_config.read(path))
    seed = broadcast(secrets.randbelow(1 << 32)) if given["seed"] is None else given["seed"]
    sampling = steer.sampling_config(given | advised, seed=seed)
    if given["save_cache"]:
        from tgen.checkpoint.prompt_cache import check_target

        check_target(given["save_cache"])
    if given["interactive"]:
        from tgen.cli.generate.interactive import repl, require_terminal

        require_terminal()
    prompt, input_ = given["prompt"], given["input_"]
    lines = None if input_ is None else LineReader(input_)
    data = None if lines or (given["interactive"] and prompt is None) else read_prompt(prompt)
    loaded = load_shared(path, given, ranks, quiet=quiet)
    for line in [f"{path} · seed {sampling.seed}", *said]:
        console.print_status(line, quiet=quiet)
    opening = initial_messages(loaded, given["system"]) if given["chat"] else None
    how: dict[str, Any] = {"kv_cache": not given["no_kv_cache"], "draft": given["draft"]}
    if given["interactive"]:
        talk = repl if opening is None else partial(chat_loop, opening=opening)
        talk(loaded, sampling, data or b"", **how)
        return False
    if opening is not None and data and prompt in (None, "-"):
        data = data.removesuffix(b"\n").removesuffix(b"\r")  # ends a line, and is not said
    writer = _writer(loaded, str(path), given, ranks)
    requests = RequestQueue(
        loaded,
        sampling,
        writer,
        samples=given["samples"],
        echo=given["echo"],
        quiet=given["quiet"],
        opening=opening,
        ranks=ranks,
    )
    cache = None
    if lines is not None:
        requests.read(lines, jsonl=str(input_).endswith((".jsonl", ".ndjson")))
    elif data is not None:
        with steer.by_option():
            requests.add(data)
        files = given["load_cache"], given["save_cache"]
        cache = _prompt_cache(loaded, data, *files, quiet=quiet)
    started = time.perf_counter()
    tokens = loaded.rows(requests.next, n_rows=given["batch_size"], prompt_cache=cache, **how)
    try:
        _write(tokens, requests, lines, quiet=quiet)
        requests.finish()
    finally:  # also after Ctrl-C
        writer.close()
    for line in requests.summary(time.perf_counter() - started, stats=given["stats"]):
        console.print_status(line, quiet=quiet)
    return requests.failed


def _write(
    tokens: Iterator[Token], requests: RequestQueue, lines: LineReader | None, *, quiet: bool
) -> None:
    """Hands every token on; of a file of rows with a bar, unless they are shown themselves."""
    shown = sys.stdout is not None and sys.stdout.isatty()
    hidden = quiet or shown or lines is None or lines.fraction is None
    with console.progress("rows", quiet=hidden) as update:
        for token in tokens:
            requests.take(token)
            if token.last and lines is not None:
                update(lines.fraction or 0.0)


def _writer(model: "Model", name: str, given: dict[str, Any], ranks: Ranks) -> Writer:
    several, shared = given["input_"] is not None or given["samples"] > 1, ranks.world_size > 1

    def described(entry: Generation) -> bytes:
        if entry.error is not None:
            return json_line(error_record(entry))
        show = model.vocabulary.bytes_of
        return json_line(record(entry, model=name, show=show, stats=given["stats"]))

    as_json = given["json_output"] or given["jsonl"]
    if shared:
        n_rows = ranks.world_size * given["batch_size"]
        return GatherWriter(described if as_json else text_line, n_rows=n_rows)
    return JsonWriter(described) if as_json else TextWriter(several=several)


def _prompt_cache(
    model: "Model", prompt: bytes, load: Path | None, save: Path | None, *, quiet: bool
) -> "PromptCache | None":
    from tgen.engine.base import common_prefix_length

    cache, ids = None, model.encode(prompt) if load or save else []
    if load:
        cache = model.load_cache(load)
        used = (
            f"{common_prefix_length(ids, cache.tokens)} of the prompt's {len(ids)} tokens are there"
        )
        if len(ids) > model.engine.context_length:
            used = "not used: the prompt is longer than the context"
        console.print_status(f"{load} · {used}", quiet=quiet)
    if save:
        cache = model.cache_prompt(ids, known=cache)
        model.save_cache(save, cache)
        console.print_status(f"{save} · {len(ids)} tokens kept", quiet=quiet)
    return cache
