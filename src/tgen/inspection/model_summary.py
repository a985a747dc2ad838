"""A summary of a model's configuration and tensors. Does not import torch."""

import os
from dataclasses import asdict

from tgen.checkpoint.model_dir import ModelBundle
from tgen.reports.inspection import ModelSummary

_DTYPES = {"uint16": "bfloat16"}  # NumPy has no bfloat16: its bits are stored as integers


def summarize(bundle: ModelBundle, found_by: str = "") -> ModelSummary:
    """Return the configuration, every tensor with its shape and dtype, and sizes in bytes."""
    config = bundle.config
    parameters = [
        (name, list(array.shape), array.size, _DTYPES.get(str(array.dtype), str(array.dtype)))
        for name, array in bundle.arrays.items()
    ]
    return ModelSummary(
        path=os.fsencode(bundle.path).decode(errors="replace"),
        family=config.family,
        config=asdict(config),
        parameters=parameters,
        n_parameters=sum(count for _, _, count, _ in parameters),
        n_embedding_parameters=sum(n for name, _, n, _ in parameters if "embedding" in name),
        weight_bytes=sum(array.nbytes for array in bundle.arrays.values()),
        cache_bytes_per_token=config.cache_bytes_per_token(),
        attention_bytes=4 * config.n_heads * config.context_length**2,
        found_by=found_by,
    )
