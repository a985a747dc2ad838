"""Models of extreme shapes whose weights fit their config.json: many heads, layers or positions."""

import math
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.models import make_config, save_model, use_model
from tgen.checkpoint.hf.tensor_names import tensor_mappings
from tgen.config import FAMILIES, RopeScaling
from tgen.errors import TgenError
from tgen.scoring import score_text

_MAX_WEIGHTS = 400_000
_SIZES = (1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 31, 33, 64, 127, 128, 129, 512)
_LARGE = (999, 1000, 1001, 4096, 5462, 10_922, 10_923, 10_950, 20_000, 65_536)
_CONTEXTS = (1, 2, 3, 16, 97, 128, 2000, 65_536, 10**6, 2**24, 2**31 - 1)
_FACTORS = (1e-6, 0.1, 1.0, 2.0, 8.0, 1e4, 1e30)


class Shapes:
    """Random shapes of every family."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model"

    def change(self, i: int, rng: Random) -> str:
        """Write a model; shapes that tgen refuses to write, or that the limit of a case's memory
        excludes, are drawn again."""
        del i
        while True:
            family = rng.choice(list(FAMILIES))
            values = _draw(family, rng)
            shutil.rmtree(self._path, ignore_errors=True)
            with suppress(TgenError, MemoryError):
                if max(_count(family, values), 4 * _cached(values)) <= _MAX_WEIGHTS:
                    save_model(self._path, family, **values)
                    return f"{family}: {values}"

    def read(self) -> None:
        """Load the model, generate and score."""
        model = use_model(self._path)
        text = b"a" * 120
        if model.engine.context_length > 100:
            model.cache_prompt(model.encode(text[:100]))
        score_text(model, text)


def _draw(family: str, rng: Random) -> dict[str, Any]:
    large = rng.choice(("n_layers", "d_model", "n_heads", "head_dim", "d_ff", "", ""))
    size: dict[str, Any] = {
        name: rng.choice(_SIZES) for name in ("d_model", "n_heads", "head_dim", "d_ff")
    }
    size |= {"n_layers": rng.choice((1, 1, 2, 3)), "context_length": rng.choice(_CONTEXTS)}
    if large:
        size[large] = rng.choice(_LARGE[:3] if large == "n_layers" else _LARGE)
        others = {"d_model", "n_heads", "head_dim", "d_ff"} - {large}
        size |= {name: rng.choice((1, 2, 4)) for name in others}
    if family in ("classic", "gpt2"):
        size["d_model"] = size["n_heads"] * size["head_dim"]
        size["d_ff"] = 4 * size["d_model"]
        if family == "classic":
            size["position"] = rng.choice(("sinusoidal", "learned"))
        return size
    size["head_dim"] += size["head_dim"] % 2
    size["n_kv_heads"] = rng.choice((1, size["n_heads"]))
    size["rope_theta"] = rng.choice((10_000.0, 1.0, 1e-6, 1e30))
    size["norm_eps"] = rng.choice((1e-6, 5e-324, 0.999))
    if rng.random() < 0.3:
        kind = rng.choice(("linear", "llama3"))
        original = rng.choice(_CONTEXTS)
        size["rope_scaling"] = RopeScaling(
            kind=kind, factor=rng.choice(_FACTORS), original_context_length=original
        )
    if family == "mistral":
        size["sliding_window"] = rng.choice((1, 2, 3, 8, 2**31 - 1))
    return size


def _cached(v: dict[str, Any]) -> int:
    """Return about the numbers in the KV cache of 128 tokens: they are memory of the model."""
    return 128 * v["n_layers"] * v.get("n_kv_heads", v["n_heads"]) * max(32, v["head_dim"]) // 16


def _count(family: str, v: dict[str, Any]) -> int:
    """Return the number of weights."""
    mappings = tensor_mappings(make_config(family, **v))
    return sum(math.prod(shape) for mapping in mappings for shape in mapping.shapes)
