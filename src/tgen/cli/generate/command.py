"""`tgen generate`: text goes to stdout as it is generated, everything else to stderr."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import typer

from tgen.cli import console
from tgen.cli.generate.options import CORPUS, PANELS, GenerateOptions, files_in_errors, option_notes
from tgen.cli.json_output import json_line
from tgen.cli.options import flags_in_errors, make_command, read_prompt
from tgen.cli.phase_times import end_phase

if TYPE_CHECKING:
    from tgen.cli.generate import output
    from tgen.cli.generate.input_rows import LineReader
    from tgen.distributed import Ranks
    from tgen.engine.base import PromptCache
    from tgen.loaded_model import LoadedModel
    from tgen.reports.generation import Token


def generate(options: GenerateOptions) -> None:
    """Continue a text.

    The continuation goes to stdout, unchanged except on a terminal, where control characters are
    escaped; the model's name, the seed and the speed go to stderr. With --input or --samples, a
    line break follows each text; use --jsonl if texts can contain line breaks. docs/formats.md
    lists the JSON fields.

    With --chat, the prompt is a user's message, and the answer ends with the model's turn. With
    --interactive, each line continues the text, or is one message of a chat; /help lists the
    commands. Text in a prompt never becomes a control token.

    Order of processing: --words, penalties, --bias, --logit-bias, --ban, --require and the
    constraint change the logits; then the samplers apply in the order of --samplers. Strings are
    matched as bytes, across token boundaries. DRY subtracts multiplier * base^(n - allowed length)
    from the logit of a token that would extend a repeat of n tokens. A constrained text ends when
    no token can follow.

    Defaults come from the model's generation_config.json; flags override them. Under torchrun, the
    processes share the rows of --input, and one of them writes the texts in order.

    The exit status is 1 if a row of --input was invalid, a text failed, or a constrained text was
    cut off.
    """
    from tgen.cli.distributed import join_ranks

    with join_ranks(options) as ranks:
        failed = _generate(options, ranks)
    if failed:
        raise typer.Exit(1)


def _generate(options: GenerateOptions, ranks: "Ranks") -> bool:
    """Write the texts; return whether a row was invalid or a constrained text is incomplete."""
    from tgen.checkpoint.hf import generation_config
    from tgen.cli.generate import output
    from tgen.cli.generate.input_rows import LineReader
    from tgen.cli.generate.request_queue import RequestQueue
    from tgen.cli.model_loading import find_draft_model, find_paths, load_draft_model, load_shared
    from tgen.config import SamplingConfig
    from tgen.distributed import broadcast
    from tgen.generation.random_numbers import new_seed
    from tgen.lora.model_with_adapter import settings_path

    path, adapter = find_paths(options.model, options.adapter)
    draft_path = find_draft_model(options.draft_model)
    defaults = generation_config.read(settings_path(path, adapter))
    seed = options.sampling.get("seed")
    seed = broadcast(new_seed()) if seed is None else seed
    with flags_in_errors(GenerateOptions):
        sampling = SamplingConfig(**defaults.sampling | options.sampling | {"seed": seed})
    if options.save_cache:
        from tgen.checkpoint.prompt_cache import check_cache_file

        check_cache_file(options.save_cache)
    if options.interactive:
        from tgen.cli.generate.interactive import require_terminal

        require_terminal()
    lines = None if options.input_file is None else LineReader(options.input_file)
    has_prompt = options.prompt is not None or options.prompt_file is not None
    no_prompt = lines or (options.interactive and not has_prompt)
    prompt = None if no_prompt else read_prompt(options.prompt, options.prompt_file)
    model = load_shared(path, options.engine, ranks, adapter=adapter)
    if draft_path is not None:
        model.draft_with(load_draft_model(draft_path, model.options))

    @lru_cache
    def training_words() -> bytes:
        from tgen.runs.training_words import read_training_words

        with console.announce("reading the training text"):
            return b"\n".join(read_training_words(adapter or path, model.vocabulary.tokens))

    def make_sampling(given: dict[str, Any]) -> SamplingConfig:
        sampling = SamplingConfig(**defaults.sampling | {"seed": seed} | given)
        is_corpus = given.get("words") is CORPUS
        return replace(sampling, words=training_words()) if is_corpus else sampling

    if options.sampling.get("words") is CORPUS:
        sampling = make_sampling(options.sampling)
    shown = str(path) if adapter is None else f"{path} + {adapter}"
    status = output.status_lines(shown, seed, defaults, given=options.sampling)
    for line in (*option_notes(options.sampling), *status):
        console.print_status(line)
    messages = None
    if options.chat:
        _ = model.chat_format  # raises without a template, before anything else is reported
        from tgen.cli.generate.chat import message

        system = options.system
        messages = [] if system is None else [message("system", os.fsencode(system))]
    from tgen.loaded_model import Decoding  # slow, but loaded with the model

    decoding = Decoding(kv_cache=not options.no_kv_cache, draft=options.draft)
    if options.interactive:
        from tgen.cli.generate.chat import Session
        from tgen.cli.generate.chat_settings import Settings
        from tgen.cli.generate.interactive import run_session

        settings = Settings(options, make_sampling)
        run_session(Session(model, settings, decoding, messages), prompt or b"")
        return False
    if messages is not None and prompt and options.prompt in (None, "-"):
        prompt = prompt.removesuffix(b"\n").removesuffix(b"\r")  # ends the line, not the message
    writer = _make_writer(model, shown, options, ranks)
    queue = RequestQueue(model, sampling, writer, options, messages=messages, ranks=ranks)
    if lines is not None:
        queue.read(lines, jsonl=str(options.input_file).endswith((".jsonl", ".ndjson")))
    elif prompt is not None:
        with (
            flags_in_errors(GenerateOptions),
            files_in_errors(options.sampling),
            console.announce("compiling the constraint"),
        ):
            queue.add(prompt)
        cache = _prompt_cache(model, prompt, options)
        decoding = replace(decoding, prompt_cache=cache)
    began = time.perf_counter()
    tokens = model.complete(
        queue.next, batch_size=options.batch_size, decoding=decoding, on_error=writer.on_error
    )
    try:
        _write(tokens, writer, lines)
        writer.finish(queue.n_rows)
    finally:  # also after Ctrl-C
        writer.close()
    end_phase("decode")
    if not console.quiet:
        writer.end_line()
    n_rows, seconds = queue.n_rows if lines else None, time.perf_counter() - began
    summary = output.format_summary(n_rows, writer.n_failed, writer.n_tokens, seconds)
    console.print_status(summary)
    if options.stats and writer.last and not lines:
        console.print_status(output.format_stats(writer.last))
    return writer.n_failed > 0


def _write(tokens: Iterator["Token"], writer: "output.Writer", lines: "LineReader | None") -> None:
    """Pass every token to the writer; show a progress bar unless the texts are shown."""
    visible = sys.stdout is not None and sys.stdout.isatty()
    hidden = visible or lines is None or lines.fraction is None
    with console.progress("rows", hidden=hidden) as update:
        for number, token in enumerate(tokens):
            if not number:
                end_phase("prefill")
            writer.add(token)
            if token.last and lines is not None:
                update(lines.fraction or 0.0)


def _make_writer(
    model: "LoadedModel", name: str, options: GenerateOptions, ranks: "Ranks"
) -> "output.Writer":
    from tgen.cli.generate import output

    def to_json(generation: output.Generation) -> bytes:
        token_bytes = model.vocabulary.bytes_of
        return json_line(
            output.record(generation, model=name, token_bytes=token_bytes, stats=options.stats)
        )

    as_json = options.json_output or options.jsonl
    if ranks.world_size > 1:
        to_bytes = to_json if as_json else output.text_line
        n_rows = ranks.world_size * options.batch_size
        return output.GatherWriter(to_bytes, keep_tokens=as_json, n_rows=n_rows)
    if as_json:
        return output.Writer(to_json, keep_tokens=True)
    return output.TextWriter(several=options.input_file is not None or options.samples > 1)


def _prompt_cache(
    model: "LoadedModel", prompt: bytes, options: GenerateOptions
) -> "PromptCache | None":
    from tgen.engine.base import common_prefix_length

    load, save = options.load_cache, options.save_cache
    cache, ids = None, model.encode(prompt) if load or save else []
    if load:
        cache = model.load_cache(load)
        n_common = common_prefix_length(ids, cache.tokens)
        status = f"{load} · prompt tokens cached: {n_common} of {len(ids)}"
        if reason := model.why_unused(cache, ids):
            status = f"warning: {load} is not used: {reason}"
        console.print_status(status)
    if save:
        cache = model.cache_prompt(ids, known=cache)
        model.save_cache(save, cache)
        console.print_status(f"{save} · tokens saved: {len(ids)}")
    return cache


command = make_command(generate, GenerateOptions, PANELS)
