"""`tgen inspect`: one head's attention over a text, the next token, the model's parts."""

import json
from dataclasses import asdict
from typing import Annotated

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
from tgen.reports import json_text


def inspect(
    prompt: PromptOption = None,
    model: ModelOption = None,
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
    """Show what a model attends to.

    A table of one head's attention weights, the likeliest next tokens, and the model's parts.
    """
    data = read_prompt(prompt)
    from tgen.api import find_model
    from tgen.checkpoint.directory import load
    from tgen.cli.views import attention as view
    from tgen.introspect.attention import head_attention
    from tgen.introspect.predictions import next_tokens
    from tgen.introspect.summary import summarise
    from tgen.model.device import choose_device
    from tgen.model.transformer import Transformer

    path = find_model(model)
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
