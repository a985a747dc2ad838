"""`tgen inspect`: what the model attends to, expects, and is made of; or how it was trained."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tgen.cli import console
from tgen.cli.inspect.view_names import MATRICES, NO_TABLE, TEXTLESS, USED_BY, View
from tgen.cli.options import (
    DeviceOption,
    JsonOption,
    PromptOption,
    QuietOption,
    option,
    read_prompt,
)
from tgen.errors import UsageError

_PICTURES = ("--svg", "--png", "--vega")
_CHOOSING, _DRAWING, _FILES = "What to look at", "How it is drawn", "In place of tables"


def _file(name: str, help_text: str) -> Any:
    return option(name, help_text, _FILES, metavar="FILE", show_default=False)


def inspect(
    prompt: PromptOption = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            show_default="the newest in ./models, else the shipped one",
            help="A path, or a name in ./models, the data folder, or transformers' cache; two with "
            "--view heads: what changed from the first to the second.",
        ),
    ] = None,
    view: Annotated[
        list[View] | None,
        typer.Option("--view", help="What to show; may be given again.", show_default="attention"),
    ] = None,
    layer: Annotated[
        str | None,
        option("--layer", "0,2-4, -1 for the last, or all.", _CHOOSING, metavar="LAYERS"),
    ] = None,
    head: Annotated[
        str | None,
        option(
            "--head",
            "0,2-4, -1, all, or mean, of the last layer unless --layer is given; of attention "
            "otherwise the head that looks most at one other token.",
            _CHOOSING,
            metavar="HEADS",
        ),
    ] = None,
    query: Annotated[
        str | None,
        option("--query", "Tokens that look: 57, -1, or 40:64.", _CHOOSING, metavar="TOKENS"),
    ] = None,
    keys: Annotated[
        str | None,
        option("--keys", "Tokens looked at, likewise.", _CHOOSING, metavar="TOKENS"),
    ] = None,
    top: Annotated[
        int | None,
        option("--top", "How many candidates, parts or keys to list.", _CHOOSING, min=1),
    ] = None,
    target: Annotated[
        str | None,
        option(
            "--target",
            "The token that --view why explains.",
            _CHOOSING,
            metavar="TEXT",
            show_default="the likeliest",
        ),
    ] = None,
    measure: Annotated[
        Literal["attention", "value"],
        option("--measure", "Weights, or what each key adds by them.", _CHOOSING),
    ] = "attention",
    ablate: Annotated[
        Literal["zero", "mean"] | None,
        option("--ablate", "With --view heads: the loss without each head.", _CHOOSING),
    ] = None,
    tail: Annotated[
        bool, option("--tail", "Of a text past the context take the end.", _CHOOSING)
    ] = False,
    cells: Annotated[
        Literal["auto", "num", "block", "list"],
        option("--cells", "Digits, blocks or lists; what fits.", _DRAWING),
    ] = "auto",
    scale: Annotated[
        Literal["sqrt", "linear", "log"],
        option("--scale", "How weights become colours.", _DRAWING),
    ] = "sqrt",
    hide_first: Annotated[
        bool, option("--hide-first", "Leave out the first key, and say what it holds.", _DRAWING)
    ] = False,
    width: Annotated[
        int | None,
        option("--width", "Columns.", _DRAWING, min=20, max=10_000, show_default="the terminal's"),
    ] = None,
    json_output: JsonOption = False,
    csv: Annotated[Path | None, _file("--csv", "A view's numbers; - is stdout.")] = None,
    vega: Annotated[Path | None, _file("--vega", "A Vega-Lite picture, for Altair.")] = None,
    html: Annotated[Path | None, _file("--html", "A page to explore all heads.")] = None,
    svg: Annotated[Path | None, _file("--svg", "A picture for papers.")] = None,
    png: Annotated[Path | None, _file("--png", "A picture.")] = None,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Show what a model attends to, what it expects and why, and how it was trained.

    Views: attention (a head's weights), heads (what each head does), tokens (the text's surprises),
    predict (the next token), lens (that after every layer), why (what adds to its logit), rollout
    (which tokens feed a position), positions (the encoding), model (its parts), training (its
    losses), verify (whether all this is what the model does).
    """
    from tgen.checkpoint.model_lookup import find_model

    views = view or [View.attention]
    outputs = {"--csv": csv, "--vega": vega, "--html": html, "--svg": svg, "--png": png}
    wanted = {name: path for name, path in outputs.items() if path is not None}
    if view and set(wanted) == {"--html"}:
        raise UsageError("--html has all that it can show", "leave --view away")
    _check(views, model or [], wanted, json_output=json_output)
    _check_options(
        set(views) | ({View.heads, View.attention} if html else set()),
        in_full="--json" if json_output else next(iter(wanted), None),
        chosen={
            "--layer": layer is not None,
            "--head": head is not None,
            "--top": top is not None,
            "--cells": cells != "auto",
            "--scale": scale != "sqrt",
            "--query": query is not None,
            "--keys": keys is not None,
            "--hide-first": hide_first,
            "--target": target is not None,
            "--ablate": ablate is not None,
            "--measure": measure != "attention",
        },
    )
    names: list[str | None] = [*model] if model else [None]
    found = [find_model(name) for name in names]
    if views == [View.training] and not wanted:
        if prompt is not None:
            raise UsageError("--view training takes no --prompt", "leave one of the two away")
        from tgen.cli.inspect.training_log import print_training_log

        print_training_log(found[0].path, json_output=json_output, quiet=quiet)
        return
    text = read_prompt(prompt) if prompt is not None or set(views) - TEXTLESS or html else None

    from tgen.checkpoint.model_dir import load
    from tgen.cli.inspect import output
    from tgen.cli.inspect.views import Options
    from tgen.inspection.inspector import Inspector

    options = Options(
        layer=layer,
        head=head,
        query=query,
        keys=keys,
        top=top,
        target=None if target is None else os.fsencode(target),
        measure=measure,
        ablate=ablate,
        cells=cells,
        scale=scale,
        hide_first=hide_first,
        width=width,
    )
    looks = [
        Inspector(load(path), text, device=device, tail=tail, found_by=rule) for path, rule in found
    ]
    for path, _ in found:
        console.print_status(f"{path}", quiet=quiet)
    if width:
        console.out.width = width
    if len(looks) == 2:
        output.compare(looks, options, json_output=json_output, quiet=quiet)
    elif wanted:
        output.write_files(views[0], looks[0], options, wanted, quiet=quiet)
    elif json_output:
        output.write_json(views, looks[0], options, quiet=quiet)
    else:
        output.show(views, looks[0], options, quiet=quiet)


def _check_options(views: set[View], *, in_full: str | None, chosen: dict[str, bool]) -> None:
    """Raises UsageError for an option that nothing would come of; `in_full` writes whole texts."""
    for name, given in chosen.items():
        if given and not views & USED_BY[name]:
            raise UsageError(
                f"{name} changes nothing here",
                f"it is for --view {', '.join(sorted(USED_BY[name]))}",
            )
    for name in ("--query", "--keys", "--hide-first", "--cells", "--top"):
        used = views & USED_BY["--top"] - set(MATRICES) if name == "--top" else set()
        if chosen[name] and in_full and views & set(MATRICES) and not used:
            raise UsageError(
                f"{name} is for tables, {in_full} takes all tokens", "leave one of the two away"
            )
    if chosen["--hide-first"] and chosen["--keys"]:
        raise UsageError("--hide-first and --keys exclude each other", "--keys 1: is the same")


def _check(
    views: list[View], models: list[str], wanted: dict[str, Path], *, json_output: bool
) -> None:
    """Raises UsageError for what does not go together."""
    if len(set(views)) < len(views):
        raise UsageError("--view names a view twice", "name each once")
    if len(models) > 2 or (len(models) == 2 and views != [View.heads]):
        raise UsageError(
            f"--model was given {len(models)} times", "two models are compared by --view heads"
        )
    if len(models) == 2 and wanted:
        raise UsageError(f"{next(iter(wanted))} shows one model", "leave one --model away")
    if wanted and json_output:
        raise UsageError(f"--json and {next(iter(wanted))} exclude each other", "choose one")
    one_view = set(wanted) - {"--html"}
    if one_view and len(views) > 1:
        raise UsageError(f"{min(one_view)} takes one --view", f"{len(views)} were given")
    for name in wanted:
        if name == "--csv" and views[0] in NO_TABLE:
            raise UsageError(f"--csv does not have --view {views[0]}", "--json has it")
        if name in _PICTURES and views[0] not in MATRICES:
            raise UsageError(
                f"{name} does not draw --view {views[0]}", f"it draws {', '.join(MATRICES)}"
            )
    for name, path in wanted.items():
        if str(path) != "-" and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else "lies in a folder that is not there"
            raise UsageError(f"{name} {path} {what}", "name a file in a folder that exists")
    places = {path if str(path) == "-" else path.resolve() for path in wanted.values()}
    if len(places) < len(wanted):
        raise UsageError(
            f"{' and '.join(wanted)} go to one place", "stdout takes one file, a file one content"
        )
    if str(wanted.get("--png")) == "-" and sys.stdout.isatty():
        raise UsageError("--png - would write a picture into the terminal", "name a file")
