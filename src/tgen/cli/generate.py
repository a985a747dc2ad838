"""`tgen generate`: text goes to stdout as it comes, everything else to stderr."""

import json
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tgen.cli import console
from tgen.cli.loading import load_model
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
from tgen.config import DEFAULT_MAX_NEW_TOKENS, Draft, SamplingConfig
from tgen.errors import UsageError
from tgen.reports import Token, json_text

if TYPE_CHECKING:
    from tgen.api import Model
    from tgen.engine.base import PromptCache

_DEFAULT = SamplingConfig()


def generate(
    prompt: PromptOption = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=0, help="Stop after this many tokens.")
    ] = DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0: always the likeliest token.")
    ] = _DEFAULT.temperature,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0: all.")
    ] = _DEFAULT.top_k,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Draw from the likeliest tokens that hold this much; 1: all."),
    ] = _DEFAULT.top_p,
    seed: Annotated[
        int | None,
        typer.Option("--seed", show_default="a new one, printed", help="Repeats a text."),
    ] = None,
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
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    weights: WeightsOption = None,
) -> None:
    """Continue a text.

    The continuation goes to stdout and not one byte more; the model's name, the seed and the speed
    go to stderr. When the context is full, its last half is kept and the text goes on.
    """
    if no_kv_cache and (save_cache or load_cache):
        raise UsageError("--no-kv-cache does not go with a prompt cache", "leave one of them away")
    if save_cache:
        from tgen.checkpoint.prompt_cache import check_target

        check_target(save_cache)
    sampling = SamplingConfig(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
    )
    data = read_prompt(prompt)
    path, loaded = load_model(model, device=device, threads=threads, weights=weights, quiet=quiet)
    console.note(f"{path} · seed {sampling.seed}", quiet=quiet)
    ids, length = loaded.encode(data), loaded.engine.context_length
    started = time.perf_counter()
    cache = _prompt_cache(loaded, ids, load_cache, save_cache, quiet=quiet)
    if len(ids) > length:
        console.note(
            f"the prompt has {len(ids)} tokens, the context {length}: only its end is seen",
            quiet=quiet,
        )
    if echo and not json_output:
        console.write(data)
    tokens = loaded.tokens(
        [ids],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        kv_cache=not no_kv_cache,
        draft=draft,
        prompt_cache=cache,
    )
    made: list[Token] = []
    text: list[bytes] = []
    for token, piece in loaded.pieces(tokens):
        made.append(token)
        text.append(piece)
        if piece and not json_output:
            console.write(piece)
    took = time.perf_counter() - started
    if json_output:
        ended = bool(made) and made[-1].id in loaded.bundle.end_ids
        record = {
            "schema": "tgen.generate/1",
            "model": str(path),
            "seed": sampling.seed,
            **json_text(data, "prompt"),
            **json_text((data if echo else b"") + b"".join(text)),
            "finish_reason": "stop" if ended else "length",
            "prompt_tokens": len(ids),
            "tokens": [token.id for token in made],
            "logprobs": [round(token.logprob, 6) for token in made],
            "seconds": round(took, 4),
        }
        console.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    elif sys.stdout.isatty() and not b"".join(text[-1:]).endswith(b"\n"):
        console.write(b"\n")
    rate = (
        f"{len(made) / took:,.0f} tokens/s, prefill included" if made else "nothing was asked for"
    )
    if made or not save_cache:
        console.note(f"{len(made)} tokens · {rate}", quiet=quiet)


def _prompt_cache(
    model: "Model", ids: list[int], load: Path | None, save: Path | None, *, quiet: bool
) -> "PromptCache | None":
    from tgen.engine.base import n_alike

    cache = None
    if load:
        cache = model.load_cache(load)
        used = f"{n_alike(ids, cache.tokens)} of the prompt's {len(ids)} tokens are there"
        if len(ids) > model.engine.context_length:
            used = "not used: the prompt is longer than the context"
        console.note(f"{load} · {used}", quiet=quiet)
    if save:
        cache = model.cache_prompt(ids, known=cache)
        model.save_cache(save, cache)
        console.note(f"{save} · {len(ids)} tokens kept", quiet=quiet)
    return cache
