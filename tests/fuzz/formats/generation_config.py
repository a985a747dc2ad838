"""generation_config.json, and the lines that commands print about it."""

import json
from pathlib import Path
from random import Random

from fuzz.models import save_model, use_model
from fuzz.mutations import Mutator, dump
from tgen.checkpoint.hf import generation_config
from tgen.cli import console
from tgen.cli.generate.output import status_lines

_KEYS = {  # what others write
    "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9,
    "do_sample": True,
    "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "max_new_tokens": 2, "num_beams": 1,
    "eos_token_id": [0, 1], "bos_token_id": 0, "pad_token_id": 1, "stop_strings": ["x"],
    "suppress_tokens": None, "watermarking_config": {}, "transformers_version": "4.57.0",
}  # fmt: skip


class GenerationConfig:
    """A model directory whose generation_config.json is changed."""

    prints = True
    starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model"
        save_model(self._path, "llama")
        self._file = self._path / generation_config.FILE_NAME
        self._mutators = [Mutator(json.loads(self._file.read_bytes())), Mutator(_KEYS)]

    def change(self, i: int, rng: Random) -> str:
        """Change one of two files."""
        document, what = self._mutators[i % 2].change(i // 2, rng)
        self._file.write_bytes(dump(document))
        return what

    def read(self) -> None:
        """Print what `tgen generate` prints, and generate."""
        defaults = generation_config.read(self._path)
        for line in status_lines(str(self._path), 0, defaults, given=()):
            console.print_status(line)
        use_model(self._path)
