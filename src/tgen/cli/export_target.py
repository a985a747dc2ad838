"""The target of `tgen export`: its default name, and a check that it replaces only a model."""

from pathlib import Path

from tgen.checkpoint.gguf.header import read_header
from tgen.checkpoint.model_dir import DESCRIPTION_FILES, WEIGHTS
from tgen.checkpoint.ngram_tables import FILE_NAME as NGRAMS
from tgen.errors import ModelError, UsageError
from tgen.storage.files import output_problem


def default_target(name: str, dtype: str) -> Path:
    """Return the GGUF file that is written without --out."""
    return Path(f"{name}-{dtype}.gguf")


def check_target(out: Path, source: Path, *, to_file: bool, overwrite: bool) -> None:
    """Raise UsageError unless a model may be written to `out`: only a model is replaced."""
    model = source.resolve()
    if out.resolve() in (model, *model.parents):
        raise UsageError(f"--out {out} is the model itself or contains it", "choose another path")
    problem = "" if out.is_dir() else output_problem(out)
    if problem:
        raise UsageError(f"--out {out}: {problem}", "choose another path")
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
    if path.is_dir():
        known = {*DESCRIPTION_FILES, NGRAMS, "config.json", f"{WEIGHTS}.index.json"}
        for entry in sorted(path.iterdir()):
            of_a_model = entry.name in known or entry.suffix == ".safetensors"
            if not entry.is_file() or not of_a_model:
                return f"contains other files: {entry.name}"
        return ""
    try:
        read_header(path)
    except ModelError:
        return "is not a GGUF file"
    return ""
