"""Options that several commands share, and how their values are read."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tgen.config import StoredAs
from tgen.errors import UsageError


def _model_names(incomplete: str) -> list[str]:
    """For the shell: the models that are found by name."""
    from tgen.checkpoint.model_lookup import known_names

    return [name for name in known_names() if name.startswith(incomplete)]


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        show_default="the newest in ./models, else the shipped one",
        help="A path, or a name in ./models, the data folder, or transformers' cache.",
        autocompletion=_model_names,
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        show_default="read from stdin",
        help="Text to start from; '-' reads stdin.",
    ),
]
Device = Literal["auto", "cpu", "cuda", "mps"]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to compute.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, show_default="all cores", help="Processor threads."),
]
WeightsOption = Annotated[
    StoredAs | None,
    typer.Option(
        "--weights",
        show_default="as they are stored",
        help="How weights are held on a processor; int8 is the quickest, and a little less exact.",
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=1,
        max=1 << 20,
        show_default=False,
        help="With --dry-run: what the same plan comes to on so many processes or GPUs.",
    ),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        show_default=False,
        help="With --dry-run: the memory of each of those GPUs, as 80GB.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]


def option(name: str, help_text: str, panel: str, **more: Any) -> Any:
    """An option in a panel of the help; `name` may have a short form behind it."""
    return typer.Option(*name.split(), help=help_text, rich_help_panel=panel, **more)


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, and has not only its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def read_prompt(prompt: str | None) -> bytes:
    """The prompt's bytes as they were given; stdin is read only if no --prompt, or '-', says so."""
    if prompt is not None and prompt != "-":
        return os.fsencode(prompt)
    if sys.stdin is None or (sys.stdin.isatty() and prompt is None):
        raise UsageError("there is no prompt", 'give --prompt "TEXT", or pipe a text in')
    return sys.stdin.buffer.read()


def out_directory(out: Path | None, corpus: list[str]) -> Path:
    """Where a model goes: --out, else models/<name of the corpus>."""
    if out is not None:
        return out
    if not corpus:
        raise UsageError(
            "there is no corpus", "name a file of text, or `-` for stdin; to --resume, name --out"
        )
    first = corpus[0]
    if first == "-":
        return Path("models") / "stdin"
    path = Path(first)
    name = "corpus" if any(mark in first for mark in "*?[") else (path.stem or path.resolve().name)
    return Path("models") / (name.lstrip(".") or "corpus")


def parse_size(name: str, text: str | None) -> int | None:
    """200MB, 1GiB or 5000000 -> bytes; raises UsageError for what is no size of the option, and
    for a number so small that its unit must be missing."""
    if text is None:
        return None
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    pattern = r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]I?|)B?"
    match = re.fullmatch(pattern, text.strip().upper(), re.ASCII)
    n_bytes = int(float(match[1]) * units[match[2]]) if match else 0
    example = "for example 200MB or 2GiB"
    if not n_bytes:
        raise UsageError(f"{name} {text!r} is no size", example)
    if text.strip().isdigit() and n_bytes < 10**6:
        raise UsageError(f"{name} {text!r} has no unit", example)
    return n_bytes


def parse_settings(settings: list[str]) -> dict[str, str]:
    """--set field=value pairs; a later one wins. Raises UsageError where there is no `=`."""
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {setting!r} is no field=value", "for example --set n_layers=8")
        pairs[name.strip().replace("-", "_")] = value.strip()
    return pairs
