"""Typed access to the values of config.json, in any of transformers' spellings."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tgen.errors import ModelError

# Spellings of a key, accepted in every family.
_SPELLINGS = (
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("max_position_embeddings", "n_positions"),
)
_PREFIX = "config.json has"
_MAX_LAYERS = 10_000
_MAX_SIZE = (1 << 31) - 1
_OTHER_SPELLINGS = {key: group for group in _SPELLINGS for key in group}


class ConfigValues:
    """The values of a JSON object, with defaults for keys that it omits."""

    def __init__(self, json: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.json, self.defaults = json, defaults

    def __contains__(self, key: str) -> bool:
        """Return whether the object has the key in any spelling, or there is a default."""
        return any(True for _ in self._found(key))

    def get(self, key: str) -> Any:
        """Return the value of a key; raises KeyError if it is missing and has no default."""
        for value in self._found(key):
            return value
        raise KeyError(key)

    def boolean(self, key: str) -> bool:
        """Return true or false, for null the default; raises ModelError for other values."""
        value = self.get(key)
        value = self.defaults.get(key) if value is None else value
        if not isinstance(value, bool):
            raise invalid_value(key, value, "true or false")
        return value

    def number(self, key: str) -> float:
        """Return a finite number; raises ModelError for other values."""
        return require_number(self.get(key), key)

    def positive(self, key: str) -> float:
        """Return a finite number above 0; raises ModelError for other values."""
        if (value := self.number(key)) <= 0:
            raise invalid_value(key, value, "a number > 0")
        return value

    def integer(self, key: str, *, null: int | None = None) -> int:
        """Return a positive integer, for null `null`; raises ModelError for other values."""
        value = self.get(key)
        if value is None and null is not None:
            return null
        return require_positive_integer(value, key)

    def _found(self, key: str) -> Iterator[Any]:
        spellings = sorted(_OTHER_SPELLINGS.get(key, (key,)), key=lambda name: name != key)
        yield from (self.json[name] for name in spellings if name in self.json)
        yield from (self.defaults[name] for name in spellings if name in self.defaults)


def invalid_value(key: str, value: object, expected: str, prefix: str = _PREFIX) -> ModelError:
    """Return the error of a key with another value than an `expected` one."""
    return ModelError(f"{prefix} {key}={value!r}"[:200], f"set {key} to {expected}")


def require_number(value: object, key: str) -> float:
    """Return a finite number; raises ModelError for other values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        raise invalid_value(key, value, "a number")
    return float(value)  # type: ignore[arg-type]


def require_positive_integer(value: object, key: str, prefix: str = _PREFIX) -> int:
    """Return a size from a file; raises ModelError unless it is from 1 to 2^31 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
        raise invalid_value(key, value, f"an integer from 1 to {_MAX_SIZE:,}", prefix)
    return value


def require_layers(n_layers: int, prefix: str = _PREFIX) -> None:
    """Raise ModelError for more layers than any model has: lists of that length would be made."""
    if n_layers > _MAX_LAYERS:
        raise ModelError(
            f"{prefix} {n_layers:,} layers (limit {_MAX_LAYERS:,})",
            "download the file again: it is damaged",
        )


def require_values(json: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raise ModelError if a key has another value than the only one that tgen implements."""
    for key, value in supported.items():
        if json.get(key, value) not in (value, None):
            raise ModelError(
                f"config.json has {key}={json[key]!r}"[:200], f"use a model with {key}={value!r}"
            )
