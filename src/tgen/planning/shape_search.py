"""The shape of a model with a given number of parameters, in any family."""

import math
from collections.abc import Iterator, Mapping
from itertools import count, product
from typing import Any, NamedTuple

from tgen.config import SIZES, ModelConfig
from tgen.errors import UsageError
from tgen.planning.costs import block_shapes, n_elements, n_parameters, outer_shapes

_TOLERANCE = 0.02  # of the number of parameters
_WIDE = 384  # from here on, heads have 64 dimensions instead of 32, as in SIZES
_FEED_FORWARD = 1.6  # times the family's d_ff, or that divided by it, at most
_MAX_LAYERS = 12  # or four times as many as in SIZES, in wide models


class Shape(NamedTuple):
    """Fields of ModelConfig."""

    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int


def nearest_size(parameters: int, family: str = "qwen3", vocab_size: int = 1024) -> str:
    """Return the name of SIZES with the most similar number of parameters."""

    def distance(size: str) -> float:
        model = ModelConfig.of(family, **SIZES[size], vocab_size=vocab_size)
        return abs(math.log(n_parameters(model) / parameters))

    return min(SIZES, key=distance)


def find_shape(family: str, parameters: int, fields: Mapping[str, Any]) -> Shape:
    """Return the shape of a model with `parameters`, within 2%; tied ones count once.

    `fields` are the other fields of the model. The shape has as many layers for its width as those
    of SIZES, if possible. Raise UsageError if no shape has this number of parameters.
    """
    shapes = dict(_shapes(family, parameters, fields))
    if shapes:
        return min(shapes, key=lambda shape: shapes[shape])
    narrow = _model(family, 16, fields)
    enough = n_elements(outer_shapes(narrow)) + 2 * n_elements(block_shapes(narrow))
    raise UsageError(
        f"parameters: no model of the {family} family has {parameters:,} with a vocabulary of "
        f"{narrow.vocab_size:,} tokens",
        f"set parameters to {enough:,} or more, or choose a smaller --vocab-size",
        field="parameters",
    )


def _shapes(
    family: str, parameters: int, fields: Mapping[str, Any]
) -> Iterator[tuple[Shape, float]]:
    """Yield shapes with about `parameters`, each with its distance from an ideal one."""
    most = (1 + _TOLERANCE) * parameters
    for d_model in _widths():
        model = _model(family, d_model, fields)
        outer, block = n_elements(outer_shapes(model)), n_elements(block_shapes(model))
        n_up = 2 if model.gated else 1
        per_unit = (n_up + 1) * d_model + n_up * model.feed_forward_bias  # of d_ff
        if outer + block / _FEED_FORWARD > most:
            return
        ideal, exact = d_model / _head_width(d_model), (parameters - outer) / block
        numbers = {max(1, math.floor(exact)), max(1, math.ceil(exact))}
        for n_layers, unit in product(numbers, (32, 8)):
            missing = (parameters - outer - n_layers * block) / (n_layers * per_unit)
            d_ff = unit * round((model.d_ff + missing) / unit)
            if family == "classic":  # whose d_ff is fixed
                d_ff = model.d_ff
            stretch = d_ff / model.d_ff
            total = outer + n_layers * (block + per_unit * (d_ff - model.d_ff))
            error = abs(total / parameters - 1)
            fits = error <= _TOLERANCE and n_layers <= max(_MAX_LAYERS, 4 * ideal)
            if not fits or not 1 / _FEED_FORWARD <= stretch <= _FEED_FORWARD:
                continue
            ratios = n_layers / ideal, stretch, ideal / model.n_heads
            distance = 10 * error + sum(abs(math.log(ratio)) for ratio in ratios)
            distance += 0.05 * (d_ff % 32 > 0) + 0.2 * (d_model % 32 > 0) + (n_layers == 1)
            yield Shape(n_layers, d_model, model.n_heads, d_ff), distance


def _head_width(d_model: int) -> int:
    """Return the usual width of a head, and of the model per layer."""
    return 32 if d_model < _WIDE else 64


def _widths() -> Iterator[int]:
    """Yield even widths, fewer of the large ones."""
    yield from range(2, 256, 2)
    yield from range(256, 1024, 8)
    yield from count(1024, 32)


def _model(family: str, d_model: int, fields: Mapping[str, Any]) -> ModelConfig:
    """Return a model of one layer, with heads of about the usual width."""
    heads = [n for n in range(1, d_model // 2 + 1) if d_model % (2 * n) == 0]
    n_heads = min(heads, key=lambda n: abs(math.log(d_model / n / _head_width(d_model))))
    shape = {"n_layers": 1, "d_model": d_model, "n_heads": n_heads}
    return ModelConfig.of(family, **{**fields, **shape})
