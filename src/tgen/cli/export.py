"""`tgen export`: convert a model to another file format or dtype.

The target has a default name, and replaces nothing but a model.
"""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tgen.cli import console
from tgen.cli.model_loading import short_name
from tgen.cli.options import make_command, parse_size, quiet_option
from tgen.config import GgufType
from tgen.config.option import option
from tgen.errors import ModelError, TgenError, UsageError
from tgen.storage.files import output_problem

if TYPE_CHECKING:
    from tgen.checkpoint.model_dir import ModelBundle


def check_target(out: Path, source: Path, *, to_file: bool, overwrite: bool) -> None:
    """Raise UsageError unless a model may be written to `out`: only a model is replaced."""
    problem = "" if out.is_dir() else output_problem(out)
    if problem:
        raise UsageError(f"--out {out}: {problem}", "choose another path")
    model = source.resolve()
    if out.resolve() in (model, *model.parents):
        raise UsageError(f"--out {out} is the model itself or contains it", "choose another path")
    if not out.exists() or (out.is_dir() and not to_file and not any(out.iterdir())):
        return
    if out.is_dir() == to_file:
        reason = "a directory, not a file" if to_file else "a file, not a directory"
        raise UsageError(f"--out {out} is {reason}", "choose another path")
    if problem := _not_only_a_model(out):
        raise UsageError(f"--out {out} {problem}", "choose another path")
    if not overwrite:
        raise UsageError(
            f"--out {out} already contains a model",
            "add --overwrite to replace it, or choose another path",
        )


def _not_only_a_model(path: Path) -> str:
    """Return what a file or directory contains besides a model; empty if nothing."""
    from tgen.checkpoint import model_card
    from tgen.checkpoint.gguf.header import read_header
    from tgen.checkpoint.model_files import files_of_a_model, is_whole
    from tgen.checkpoint.stored_models import ADAPTER_FILES

    if path.is_dir():
        known = {*files_of_a_model(path)} - {*ADAPTER_FILES}
        others = {entry.name for entry in path.iterdir()} - known
        if is_whole(path) and (path / model_card.FILE_NAME).is_file():
            others -= {model_card.FILE_NAME}  # which stays
        shown = sorted(others, key=lambda name: (name == "config.json", name))[:5]
        if others:
            return f"contains other files: {', '.join(shown)}"
        return "" if is_whole(path) else "contains no whole model"
    try:
        read_header(path)
    except ModelError:
        return "is not a GGUF file"
    return ""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `tgen export`."""

    model: str = option(
        help_text="Model to export: a directory, a name or a GGUF file; with --merge, an adapter.",
        argument=True,
        metavar="MODEL",
    )
    to: Literal["gguf", "transformers"] = option(
        help_text="Output format: one GGUF file for llama.cpp, or a transformers directory.",
        flags="--to",
    )
    dtype: GgufType | None = option(
        None,
        "Type of the weights (in GGUF files, of the matrices); the quantized types (q8_0 to q4_0) "
        "need --to gguf.",
        "--type",
        shown_default="as stored; quantized weights become f32",
    )
    out: Path | None = option(
        None,
        "Output file; with --to transformers, the output directory (required).",
        "--out -o",
        shown_default="<name>-<type>.gguf",
    )
    merge: bool = option(
        False,
        "Merge a LoRA adapter, named instead of a model, into its base model; the weights become "
        "f32 unless --type is given.",
        "--merge",
    )
    max_shard_size: str | None = option(
        None,
        "Maximum size of a weights file with --to transformers, for example 200MB.",
        "--max-shard-size",
        metavar="SIZE",
        shown_default="5GB",
        excludes="to=gguf",
        hint="remove --max-shard-size: a GGUF export is one file",
    )
    overwrite: bool = option(False, "Replace the model at --out.", "--overwrite")
    quiet: bool = quiet_option(panel="")

    def __post_init__(self) -> None:
        if self.to == "transformers" and self.dtype not in (None, "f32", "f16", "bf16"):
            raise UsageError(
                f"--type {self.dtype} cannot be combined with --to transformers",
                "choose f32, f16 or bf16, or --to gguf",
            )
        if str(self.out) == "-":
            raise UsageError("--out -: cannot write to stdout", "name a file or a directory")
        if self.to == "transformers" and self.out is None:
            raise UsageError("--to transformers needs --out", "name the directory to write")


def export(options: ExportOptions) -> None:
    """Convert a model to a GGUF file for llama.cpp, or to another dtype or shard size.

    The model itself is not changed. tgen can load everything that it exports.
    """

    began = time.monotonic()
    from tgen.checkpoint import export as exporters
    from tgen.checkpoint.chat_template import chat_template_source
    from tgen.checkpoint.gguf import architectures, tokenizer
    from tgen.checkpoint.gguf.writer import DTYPES
    from tgen.checkpoint.model_lookup import find_model
    from tgen.checkpoint.stored_models import is_adapter
    from tgen.lora.adapter import read
    from tgen.lora.merging import rounding_error
    from tgen.lora.model_with_adapter import load

    to_file, size = options.to == "gguf", options.max_shard_size
    max_bytes = parse_size("--max-shard-size", size) if size else exporters.MAX_SHARD_BYTES
    path = find_model(options.model).path
    name = short_name(options.model, path).replace(":", "-")
    if options.out is not None:
        check_target(options.out, path, to_file=to_file, overwrite=options.overwrite)
    is_merged = is_adapter(path)
    if is_merged and not options.merge:
        raise UsageError(f"{path} is an adapter", "add --merge to merge it into its base model")
    if options.merge and not is_merged:
        raise UsageError(f"--merge: {path} is not an adapter", "remove --merge")
    bundle = load(path)
    for warning in bundle.warnings:
        console.print_status(f"warning: {warning}")
    stored: GgufType = options.dtype or ("f32" if is_merged else exporters.main_type(bundle))
    out = options.out
    if out is None:
        out = Path(f"{name}-{stored}.gguf")
        check_target(out, path, to_file=to_file, overwrite=options.overwrite)
    n = sum(array.size for array in bundle.arrays.values())
    console.print_status(
        f"{path}: {bundle.config.family}, {n:,} parameters -> {out} ({options.to}, {stored})",
    )
    if is_merged and stored in DTYPES and stored != "f32":
        pairs = read(path, bundle.config).pairs
        error = rounding_error(bundle.config, bundle.arrays, pairs, DTYPES[stored])
        console.print_status(
            f"rounding to {stored} changes what the adapter learned by {error:.1%}"
        )
    with console.progress("writing") as progress:
        types: Counter[GgufType] = Counter()
        if to_file:
            types = exporters.export_gguf(bundle, out, name=name, stored=stored, progress=progress)
        else:
            exporters.export_transformers(
                bundle, out, stored=stored, max_shard_bytes=max_bytes, progress=progress
            )
    if types.keys() - {stored}:
        counts = ", ".join(f"{n} {key}" for key, n in types.most_common())
        console.print_status(f"types of the matrices, as llama.cpp chooses: {counts}")
    differences = (
        tokenizer.describe_difference(bundle.tokenizer),
        tokenizer.describe_missing_ends(bundle.tokenizer, exporters.sorted_ends(bundle)),
        *architectures.describe_differences(bundle.config),
    )
    for difference in filter(None, differences if to_file else ()):
        console.print_status(f"warning: {difference}")
    written = out.iterdir() if out.is_dir() else [out]
    megabytes = sum(file.stat().st_size for file in written) / 1e6
    seconds = time.monotonic() - began
    console.print_status(f"wrote {megabytes:,.1f} MB to {out} in {seconds:.1f} s")
    is_chat = chat_template_source(bundle.settings_path) is not None
    console.print_try_generate(out, prompt=_prompt(bundle), chat=is_chat)


def _prompt(bundle: "ModelBundle") -> bytes:
    """Return the sample prompt of the run that trained a model; without one, common words."""
    from tgen.runs import saved_state

    try:
        text = str(saved_state.load_record(bundle.named_path)[0]["sample_prompt"])
    except (TgenError, OSError, KeyError):
        text = "What is"
    return bundle.tokenizer.make_expressible(text.encode(errors="ignore"))


command = make_command(export, ExportOptions)
