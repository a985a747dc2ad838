"""`tgen inspect`: attention over a text, the next token, the model's parts; or the training run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from tgen.cli import console
from tgen.cli.options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PromptOption,
    QuietOption,
    read_prompt,
)
from tgen.errors import UsageError
from tgen.reports import json_text

_PLAIN_WIDTH = 80  # columns where there is no terminal to fit


def inspect(
    prompt: PromptOption = None,
    model: ModelOption = None,
    view: Annotated[
        Literal["attention", "training"],
        typer.Option("--view", help="What the model does with a prompt, or how it was trained."),
    ] = "attention",
    layer: Annotated[
        int, typer.Option("--layer", help="From 0; negative ones count from the last.")
    ] = -1,
    head: Annotated[
        int, typer.Option("--head", help="From 0; negative ones count from the last.")
    ] = 0,
    top: Annotated[int, typer.Option("--top", min=1, help="How many next tokens to list.")] = 10,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Show what a model attends to, or how it was trained.

    A table of one head's attention weights, the likeliest next tokens, and the model's parts. With
    --view training: the losses of its run, in the terminal.
    """
    from tgen.api import find_model

    if view == "training":
        if prompt is not None:
            raise UsageError("--view training takes no --prompt", "leave one of the two away")
        _show_training(find_model(model), json_output=json_output, quiet=quiet)
        return
    data = read_prompt(prompt)
    _show_attention(
        find_model(model),
        data,
        layer=layer,
        head=head,
        top=top,
        json_output=json_output,
        quiet=quiet,
        device=device,
    )


def _show_training(path: Path, *, json_output: bool, quiet: bool) -> None:
    from tgen.checkpoint import run_log
    from tgen.cli.views.history import training_figure
    from tgen.introspect.training import training_curves

    records = run_log.read(path)
    console.note(f"{path}", quiet=quiet)
    if json_output:
        record = {"schema": "tgen.inspect.training/1", "records": records}
        console.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        return
    curves = training_curves(records)
    if console.out.is_terminal:
        console.show(*training_figure(curves, width=console.out.width))
    else:
        lines = training_figure(curves, width=_PLAIN_WIDTH)
        console.write("".join(f"{line.plain}\n" for line in lines).encode())


def _show_attention(
    path: Path,
    data: bytes,
    *,
    layer: int,
    head: int,
    top: int,
    json_output: bool,
    quiet: bool,
    device: str,
) -> None:
    from tgen.checkpoint.directory import load
    from tgen.cli.views import attention as view
    from tgen.introspect.attention import head_attention
    from tgen.introspect.predictions import next_tokens
    from tgen.introspect.summary import summarise
    from tgen.model.device import choose_device
    from tgen.model.transformer import Transformer

    bundle = load(path)
    console.note(f"{path}", quiet=quiet)
    transformer = Transformer.from_arrays(bundle.config, bundle.arrays).to(choose_device(device))
    ids = bundle.tokenizer.encode(data)
    weights = head_attention(transformer, ids, layer=layer, head=head)
    candidates = next_tokens(transformer, bundle.tokenizer, ids, top=top)
    summary = summarise(bundle)
    tokens = [bundle.tokenizer.token_bytes(i) for i in ids]
    if json_output:
        record = {
            "schema": "tgen.inspect/1",
            "model": asdict(summary),
            "tokens": [{"id": i} | json_text(token) for i, token in zip(ids, tokens, strict=True)],
            "attention": asdict(weights),
            "next": [asdict(c) | json_text(c.text) for c in candidates],
        }
        console.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        return
    table, caption = view.attention_table(weights, tokens, width=console.out.width)
    parts, shape = view.summary_table(summary)
    console.show(
        parts,
        shape,
        "",
        table,
        caption,
        "",
        "what each token (row) may look at (column):",
        view.mask_picture(len(ids)),
        "",
        view.prediction_table(candidates),
    )
