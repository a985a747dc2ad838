"""JSON rows of `tgen generate --input`: a row that is refused must not change the others."""

import json
from pathlib import Path
from random import Random
from typing import Any

from fuzz.formats.command import Command
from fuzz.mutations import EXTREMES, Mutator, dump
from tgen.config import SamplingConfig

_GOOD = b'{"prompt": "ab", "id": "good", "max_new_tokens": 3, "seed": 1}'
_SAMPLING: dict[str, Any] = {
    "max_new_tokens": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 7, "min_p": 0.1,
    "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1,
    "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "penalty_window": 8, "penalize_prompt": False, "no_repeat_ngram": 2, "dry_multiplier": 1.0,
    "dry_base": 2.0, "dry_allowed_length": 1, "dry_breakers": ["\n"], "logprobs": 2,
    "explain": True,
    "samplers": ["top_k", "min_p"], "overflow": "stop",
}  # fmt: skip
_ROWS: list[dict[str, Any]] = [
    {"prompt": "the king", "id": [1, {"a": None}], "samples": 2, "echo": True, **_SAMPLING},
    {"prompt_bytes": "dGhlIGtpbmc=", "max_new_tokens": 2, "stop": ["x", "yz"], "bias": {"a": 2.0}},
    {"prompt": "a", "n": 2, "ban": ["b"], "require": ["c"], "until_newline": False, "t": 0},
    {"prompt": "a", "n": 2, "logit_bias": {"5": -100.0}, "stop_token_ids": [7], "min_tokens": 1},
    {"prompt": "a", "choices": ["yes", "no"], "max-new-tokens": 4},
    {"prompt": "a", "regex": "[a-c]{2}", "max_new_tokens": 4},
    {"prompt": "a", "json_schema": {"type": "integer"}, "max_new_tokens": 4},
    {"prompt": "a", "grammar": 'root ::= [a-c]{2} "x"', "max_new_tokens": 4},
]


class Rows:
    """Two rows, one of which is changed."""

    prints = True
    starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._command = Command(folder)
        self._mutators = [Mutator(row) for row in _ROWS]
        self._path = folder / "rows.jsonl"
        self._path.write_bytes(_GOOD)
        (self._good,) = self._generate()

    def change(self, i: int, rng: Random) -> str:
        """Change a row; sometimes one of its sampling fields for any of SamplingConfig."""
        mutator = self._mutators[i % len(self._mutators)]
        document, what = mutator.change(i // len(self._mutators), rng)
        if i % 7 == 0 and isinstance(document, dict):
            name = rng.choice(list(SamplingConfig.__dataclass_fields__))
            value = rng.choice(EXTREMES)
            document, what = {**mutator.document, name: value}, f"{name} = {value!r}"[:100]
        self._path.write_bytes(dump(document) + b"\n" + _GOOD + b"\n")
        return what

    def read(self) -> None:
        """Generate for both rows; the good one's output must be what it is alone."""
        rows = self._generate()
        good = [row | {"row": 0, "line": 1} for row in rows if row.get("id") == "good"]
        assert good[-1:] == [self._good] or self._command.was_cut, f"the good row: {rows}"

    def _generate(self) -> list[dict[str, Any]]:
        sampling = {"seed": 1}
        self._command.generate(
            input_file=str(self._path), jsonl=True, batch_size=2, sampling=sampling
        )
        return [json.loads(line) for line in self._command.written.splitlines()]
