"""generation_config.json: how a model's makers would have its texts drawn.

It is advice. What cannot be followed is said and passed over, so that it never keeps a model from
being used.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgen.config import SamplingConfig, SamplingOptions
from tgen.errors import TgenError, UsageError
from tgen.storage import files

FILE = "generation_config.json"
_LIMIT = 1 << 20
_LARGEST = 1 << 53  # whole numbers that are floats too
_OURS = {  # theirs: ours
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "max_new_tokens": "max_new_tokens",
}
# What else changes which tokens come, and the values that mean off; null always does.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "dola_layers": (),
    "custom_generate": (),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """What the file says, as far as it can be followed."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)  # as far as it is not ours
    end_ids: list[int] | None = None  # None: it says nothing of them
    notes: list[str] = field(default_factory=list)  # what is passed over, a line each


def read(path: Path) -> GenerationDefaults:
    """The defaults of the model directory `path`; none where there is no such file."""
    if not (path / FILE).exists():
        return GenerationDefaults()
    try:
        found = json.loads(files.read(path / FILE, limit=_LIMIT))
    except (ValueError, RecursionError):
        return GenerationDefaults(notes=[f"{FILE} is ignored: it is not valid JSON"])
    except TgenError as error:
        return GenerationDefaults(notes=[f"{FILE} is ignored: {error.message}"])
    if not isinstance(found, dict):
        return GenerationDefaults(notes=[f"{FILE} is ignored: it is not a JSON object"])
    return _understood({key: value for key, value in found.items() if value is not None})


def _understood(found: dict[str, Any]) -> GenerationDefaults:
    usual, sampling = SamplingConfig(), {}
    ignored: list[str] = []
    for theirs, ours in _OURS.items():
        if theirs not in found:
            continue
        try:
            value = _number(theirs, found[theirs])
            SamplingConfig(**{ours: value})  # type: ignore[arg-type]  # checks it
        except UsageError as error:
            wanted = error.hint.replace(f"{ours} must", "it must")
            ignored.append(f"{theirs} {_shown(found[theirs])} ({wanted})")
            continue
        if value != getattr(usual, ours):
            sampling[ours] = value
    drawn = found.get("do_sample", True)
    if not isinstance(drawn, bool):
        ignored.append(f"do_sample {_shown(drawn)} (it must be true or false)")
    elif not drawn:
        sampling["temperature"] = 0.0
    ends = found.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    ids = [i for i in listed if type(i) is int and i >= 0]
    if ends is not None and len(ids) < len(listed):
        ignored.append(f"eos_token_id {_shown(ends)} (it must be ids of tokens)")
    notes = [f"{FILE}: ignored: {', '.join(ignored)}"] if ignored else []
    others = [
        f"{name} {_shown(found[name])}"
        for name, off in _UNKNOWN.items()
        if name in found and found[name] is not False and found[name] not in off
    ]
    if others:
        notes.append(f"{FILE}: not followed: {', '.join(others)}")
    return GenerationDefaults(SamplingOptions(**sampling), ids or None, notes)  # type: ignore[typeddict-item]


def _number(name: str, value: Any) -> float:
    """Raises UsageError, as SamplingConfig does for numbers that cannot be used."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} is {value}", "it must be a number")
    if _LARGEST < abs(value) < math.inf:
        raise UsageError(f"{name} is too large", "it must be a number of a usual size")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
