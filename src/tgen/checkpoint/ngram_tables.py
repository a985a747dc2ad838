"""`ngrams.safetensors`: n-grams of the training text, from which drafts are proposed."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.errors import ModelError

FILE_NAME = "ngrams.safetensors"
_COLUMNS = {"ngrams_2": 3, "ngrams_3": 4, "ngrams_4": 5}


def load(folder: Path, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Return the tables that `corpus.ngram_tables` built; empty if the file does not exist.

    Raises ModelError if they are damaged or belong to a model with another vocabulary.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return {}
    hint = f"remove {path}; the model works without it"
    header = safetensors_file.read_header(path, hint=hint)
    for name, entry in header.items():
        if entry.dtype not in ("U16", "U32") or entry.shape[1:] != (_COLUMNS.get(name),):
            raise ModelError(f"{path}: {name!r} {entry.shape} is not an n-gram table", hint)
    tables = safetensors_file.read_arrays(path, header)
    for table in tables.values():
        if table[:, :-1].max(initial=0) >= vocab_size or table[:, -1].max(initial=0) > 100:
            raise ModelError(f"{path} does not fit a vocabulary of {vocab_size} tokens", hint)
    return tables
