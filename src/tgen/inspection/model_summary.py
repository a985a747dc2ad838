"""What a model is made of."""

import os
from dataclasses import asdict

from tgen.checkpoint.model_dir import ModelBundle
from tgen.reports import ModelSummary

_STORED = {"uint16": "bfloat16"}  # as NumPy holds it


def summarize(bundle: ModelBundle, found_by: str = "") -> ModelSummary:
    """The configuration, every tensor with its shape, and what they weigh."""
    config = bundle.config
    parameters = [
        (name, list(array.shape), array.size, _STORED.get(str(array.dtype), str(array.dtype)))
        for name, array in bundle.arrays.items()
    ]
    return ModelSummary(
        path=os.fsencode(bundle.path).decode(errors="replace"),
        family=config.family,
        fields=asdict(config),
        parameters=parameters,
        n_parameters=sum(count for _, _, count, _ in parameters),
        n_embedding_parameters=sum(n for name, _, n, _ in parameters if "embedding" in name),
        weight_bytes=sum(array.nbytes for array in bundle.arrays.values()),
        cache_bytes_per_token=config.cache_bytes_per_token,
        attention_bytes=4 * config.n_heads * config.context_length**2,
        found_by=found_by,
    )
