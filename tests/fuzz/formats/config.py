"""config.json of every family: what tgen writes, and what other programs write."""

import json
from pathlib import Path
from random import Random
from typing import Any

from fuzz.models import save_model, use_model
from fuzz.mutations import Mutator, dump
from tgen.config import FAMILIES, RopeScaling

_LLAMA3 = RopeScaling(factor=8.0, original_context_length=8)
_LONGROPE = RopeScaling(
    kind="longrope",
    factor=2.0,
    original_context_length=16,
    short_factor=(1.0,),
    long_factor=(2.0,),
)
_MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"rope_scaling": _LLAMA3}),
    ("llama", {"attention_bias": True, "output_bias": True, "feed_forward_bias": True}),
    ("qwen3", {"rope_scaling": RopeScaling(kind="linear", factor=2.0), "tied_embeddings": False}),
    ("classic", {"position": "learned"}),
    ("llama", {"rope_scaling": RopeScaling(kind="yarn", factor=2.0, original_context_length=8)}),
    ("phi3", {"rope_scaling": _LONGROPE}),
]
_MORE = {  # keys that others write
    "llama": {"pretraining_tp": 1, "eos_token_id": [0, 1], "layer_types": ["full_attention"]},
    "mistral": {"head_dim": None, "sliding_window": None},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8},
    "qwen3": {"partial_rotary_factor": 1.0, "quantization_config": None},
    "gpt2": {"task_specific_params": {}, "n_inner": None, "reorder_and_upcast_attn": False},
    "classic": {"n_special": 0, "predict_special_tokens": True},
    "gpt_neo": {"attention_layers": ["local"], "attention_dropout": 0},
    "gpt_neox": {"rotary_pct": 1.0, "use_parallel_residual": True, "classifier_dropout": 0.1},
    "phi3": {"original_max_position_embeddings": 4096, "embd_pdrop": 0.0, "auto_map": {}},
    "gemma3": {
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
    },
    "olmo2": {"use_cache": True, "attention_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 4, "max_window_layers": 1, "pretraining_tp": 2},
    "granite": {"logits_scaling": 8, "attention_multiplier": 0.0078125},
}


class Config:
    """A model directory whose config.json is changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._models: list[tuple[Path, Mutator]] = []
        for i, (family, values) in enumerate(_MODELS):
            path = folder / f"{family}-{i}"
            save_model(path, family, **values)
            config = json.loads((path / "config.json").read_bytes()) | _MORE.get(family, {})
            self._models.append((path, Mutator(config)))

    def change(self, i: int, rng: Random) -> str:
        """Change the file of one model."""
        self._path, mutator = self._models[i % len(self._models)]
        document, what = mutator.change(i // len(self._models), rng)
        (self._path / "config.json").write_bytes(dump(document))
        return f"{self._path.name}: {what}"

    def read(self) -> None:
        """Load the model and generate."""
        use_model(self._path)
