"""generation_config.json: the sampling defaults that a model's authors recommend.

Values that cannot be used are reported and ignored: a bad file never prevents using a model.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgen.checkpoint.hf.config import read_json_object
from tgen.config import SamplingConfig
from tgen.errors import ModelError, UsageError

FILE_NAME = "generation_config.json"
_MAX_EXACT_FLOAT = 1 << 53  # larger integers may not be exact as floats
_FIELDS = {  # transformers' key -> field of SamplingConfig
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "max_new_tokens": "max_new_tokens",
}
# Unsupported keys that change which tokens are generated -> values that disable them; so do null,
# false and empty lists.
_UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias"), None),
    **dict.fromkeys(("stop_strings", "suppress_tokens", "begin_suppress_tokens"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), None),
    **dict.fromkeys(("top_h", "dola_layers", "custom_generate"), None),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """The usable values of the file."""

    sampling: dict[str, Any] = field(default_factory=dict)  # values other than tgen's defaults
    end_ids: list[int] | None = None  # None: not in the file
    notes: list[str] = field(default_factory=list)  # one line per kind of ignored value


def read(path: Path) -> GenerationDefaults:
    """Return the defaults of the model directory `path`; empty if it has no such file."""
    if not (path / FILE_NAME).exists():
        return GenerationDefaults()
    try:
        values = read_json_object(path / FILE_NAME, limit=1 << 20)
    except ModelError as error:
        return GenerationDefaults(notes=[f"{FILE_NAME} is ignored: {error.message}"])
    values = {key: value for key, value in values.items() if value is not None}
    sampling: dict[str, Any] = {}
    ignored: list[str] = []
    for key, name in _FIELDS.items():
        if key not in values:
            continue
        try:
            number = _check_number(key, values[key])
            SamplingConfig(**{name: number})  # type: ignore[arg-type]  # checks the range
        except UsageError as error:
            expected = error.hint.removeprefix(f"set {name} to ")
            ignored.append(f"{key} {_shown(values[key])} (expected {expected})")
            continue
        if number != getattr(SamplingConfig(), name):
            sampling[name] = number
    do_sample = values.get("do_sample", True)
    if not isinstance(do_sample, bool):
        ignored.append(f"do_sample {_shown(do_sample)} (expected true or false)")
    elif not do_sample:
        sampling["temperature"] = 0.0
    ends = values.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    end_ids = [i for i in listed if type(i) is int and i >= 0]
    if ends is not None and len(end_ids) < len(listed):
        ignored.append(f"eos_token_id {_shown(ends)} (expected token ids)")
    notes = [f"{FILE_NAME}: ignored: {', '.join(ignored)}"] if ignored else []
    unsupported = [
        f"{key} {_shown(values[key])}"
        for key, disabled in _UNSUPPORTED.items()
        if key in values and values[key] is not False and values[key] not in (disabled, [], {}, "")
    ]
    if unsupported:
        notes.append(f"{FILE_NAME}: not supported: {', '.join(unsupported)}")
    return GenerationDefaults(sampling, end_ids or None, notes)


def _check_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{key}: invalid value {value}", "a number")
    if _MAX_EXACT_FLOAT < abs(value) < math.inf:
        raise UsageError(f"{key} is too large", f"at most {_MAX_EXACT_FLOAT:,}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
