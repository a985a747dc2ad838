"""`ngrams.safetensors`: what usually follows in the text that a model was trained on."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.errors import ModelError

FILE = "ngrams.safetensors"
_COLUMNS = {"ngrams_2": 3, "ngrams_3": 4, "ngrams_4": 5}


def load(folder: Path, vocab_size: int) -> dict[str, NDArray[Any]]:
    """The tables that `corpus.ngram_tables` made; none where there is no file.

    Raises ModelError if they are damaged or of a model with another vocabulary.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        header = safetensors_file.read_header(path)
    except ModelError as error:
        raise ModelError(error.message, f"the model does without it: remove {path}") from None
    for name, entry in header.items():
        if entry.dtype not in ("U16", "U32") or entry.shape[1:] != (_COLUMNS.get(name),):
            raise ModelError(f"{path} holds {name!r} {entry.shape}, no n-grams", f"remove {path}")
    tables = safetensors_file.read(path, header)
    for rows in tables.values():
        if rows[:, :-1].max(initial=0) >= vocab_size or rows[:, -1].max(initial=0) > 100:
            raise ModelError(f"{path} is not of a model with {vocab_size} tokens", f"remove {path}")
    return tables
