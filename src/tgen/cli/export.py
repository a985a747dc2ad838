"""`tgen export`: a model in the form that another program wants."""

import shlex
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from tgen.cli import console
from tgen.cli.options import QuietOption, parse_size
from tgen.errors import UsageError


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="Model: a directory, a name (see the manual), or a GGUF file.",
        ),
    ],
    to: Annotated[
        Literal["gguf", "transformers"],
        typer.Option(
            "--to", help="One file for llama.cpp, or a directory as transformers reads it."
        ),
    ],
    kind: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None,
        typer.Option(
            "--type",
            show_default="as it is stored, q8_0 as f32",
            help="How weights are stored; with --to gguf only matrices. q8_0: GGUF's 8 bits.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            show_default="<name>-<type>.gguf",
            help="File to write; with --to transformers the directory.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            show_default="5GB",
            help="With --to transformers: how large a file of weights may be, as 200MB.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in --out.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Write a model in another form: GGUF for llama.cpp, or other types and shards.

    The model itself is left as it is. tgen reads back what it writes.
    """
    began = time.monotonic()
    if to == "gguf" and max_shard_size is not None:
        raise UsageError("--max-shard-size is for --to transformers", "GGUF is one file")
    if to == "transformers" and kind == "q8_0":
        raise UsageError("--type q8_0 is GGUF's own", "choose f32, f16 or bf16, or --to gguf")
    if str(out) == "-":
        raise UsageError("--out - cannot be written to", "name a file or a directory")
    if to == "transformers" and out is None:
        raise UsageError("--to transformers needs --out", "name the directory to write")
    from tgen.checkpoint import export as exporting
    from tgen.checkpoint.model_dir import load
    from tgen.checkpoint.model_lookup import find_model

    most = parse_size("--max-shard-size", max_shard_size) or exporting.MAX_SHARD_BYTES
    path = find_model(model).path
    name = Path(model or path).name or path.resolve().name  # a cache's folder is called otherwise
    name = name.removesuffix(".gguf")
    if out is not None:
        exporting.check_target(out, path, to_file=to == "gguf", overwrite=overwrite)
    bundle = load(path)
    stored = exporting.stored_as(bundle) if kind is None else exporting.TYPES[kind]
    short = next(name for name, long in exporting.TYPES.items() if long == stored)
    if out is None:
        out = Path(f"{name}-{short}.gguf")
        exporting.check_target(out, path, to_file=to == "gguf", overwrite=overwrite)
    n = sum(array.size for array in bundle.arrays.values())
    console.print_status(
        f"{path}: {bundle.config.family}, {n:,} parameters -> {out}, {to}, {short}", quiet=quiet
    )
    with console.progress("writing", quiet=quiet) as progress:
        if to == "gguf" or stored == "int8":
            exporting.to_gguf(bundle, out, name=name, stored=stored, progress=progress)
        else:
            exporting.to_transformers(
                bundle, out, dtype=stored, max_shard_bytes=most, progress=progress
            )
    took = time.monotonic() - began
    console.print_status(f"done: {_size(out) / 1e6:,.1f} MB in {out}, {took:.1f} s", quiet=quiet)
    console.print_status(
        f'try: tgen generate --model {shlex.quote(str(out))} --prompt "What is"', quiet=quiet
    )


def _size(path: Path) -> int:
    parts = path.iterdir() if path.is_dir() else [path]
    return sum(part.stat().st_size for part in parts)
