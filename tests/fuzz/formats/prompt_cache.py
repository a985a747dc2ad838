"""Prompt cache files: damaged ones, and ones whose checksum is right."""

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzz.formats.safetensors import SafetensorsFile
from fuzz.models import save_model
from fuzz.mutations import EXTREMES, corrupt
from tgen.checkpoint import prompt_cache, safetensors_file
from tgen.config import EngineOptions, SamplingConfig
from tgen.engine.base import PromptCache
from tgen.errors import UsageError
from tgen.loaded_model import Decoding, open_model

_PROMPT = b"the king"


class Cache:
    """A prompt cache of a model."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        save_model(folder / "model", "qwen3")
        self._model = open_model(folder / "model", EngineOptions(device="cpu", threads=1))
        self._ids = self._model.encode(_PROMPT)
        self._cache = self._model.cache_prompt(self._ids)
        self._path = folder / "prompt.cache"
        self._model.save_cache(self._path, self._cache)
        self._file = SafetensorsFile(self._path)
        header = json.loads(
            self._file.whole[8 : 8 + int.from_bytes(self._file.whole[:8], "little")]
        )
        assert set(header) >= {"tokens", "keys", "values"}

    def change(self, i: int, rng: Random) -> str:
        """Change the header, the bytes, or what was computed."""
        if i % 4 == 0:
            return self._forge(rng)
        if i % 4 == 1:
            position = rng.randrange(len(self._file.whole))
            content, what = corrupt(self._file.whole, [(position, rng.choice((1, 2)))], rng)
            self._path.write_bytes(content)
            return what
        return self._file.change(i // 4 * 2 + i % 4 - 2, rng)

    def _forge(self, rng: Random) -> str:
        """Save other tokens, keys and values, as an attacker would who knows the model."""
        n = rng.choice((0, 1, len(self._ids), len(self._ids) - 1, 16, 17, 1000))
        shape = list(self._cache.keys.shape)
        shape[2] = n
        if rng.random() < 0.2:
            shape[rng.randrange(4)] = rng.choice((0, 1, 2, 3, 100))
        keys = np.zeros(shape, np.float32)
        keys[...] = rng.choice((0.0, 1e38, float("nan"), float("inf"), -1e-45, 1.0))
        values = np.zeros(shape, np.float32) + np.float32(
            rng.choice((0.0, 3e38, float("nan"), 1.0))
        )
        tokens = [rng.choice([*self._ids, 10**6]) for _ in range(n)]
        if rng.random() < 0.6:
            tokens = (self._ids * 999)[:n]
        number = [v for v in EXTREMES if type(v) is int and abs(v) < 2**63]
        if tokens and rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] = rng.choice(number)
        arrays: dict[str, Any] = {
            "tokens": np.array(tokens, np.int64),
            "keys": keys,
            "values": values,
        }
        dtypes = {"keys": np.float16, "tokens": np.int32}
        for name in rng.sample(sorted(dtypes), rng.choice((0, 0, 0, 1))):
            arrays[name] = arrays[name].astype(dtypes[name])
        labels = {
            "model": f"{prompt_cache.VERSION} {self._model._identity.digest}".encode(),
            "weights": self._model._identity.dtype.encode(),
            "name": rng.choice((b"", b"\x1b[2J\xff", b"x" * 5000)),
            "sha256": prompt_cache._digest(arrays),
        }
        name = rng.choice(sorted(labels))
        if rng.random() < 0.2:
            labels[name] = rng.choice((b"", b"\x1b[2J\xff", labels[name] + b"x", b"x" * 100_000))
        texts = {key: np.frombuffer(text, np.uint8) for key, text in labels.items()}
        content = safetensors_file.serialize_in_parts({**arrays, **texts})
        self._path.write_bytes(b"".join(content))
        return f"forged, {shape}, {name}, {tokens[:20]}"

    def read(self) -> None:
        """Load the cache and generate with it."""
        with suppress(UsageError):
            prompt_cache.check_cache_file(self._path)
        cache: PromptCache = self._model.load_cache(self._path)
        sampling = SamplingConfig(max_new_tokens=1)
        decoding = Decoding(prompt_cache=cache)
        for _ in self._model.tokens([self._ids], sampling=sampling, decoding=decoding):
            pass
        self._model.cache_prompt(self._ids, known=cache)
