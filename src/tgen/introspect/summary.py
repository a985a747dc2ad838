"""What a model is made of."""

from dataclasses import asdict

from tgen.checkpoint.directory import ModelBundle
from tgen.reports import ModelSummary


def summarise(bundle: ModelBundle) -> ModelSummary:
    """The configuration, every tensor with its shape, and what they weigh."""
    parameters = [(name, list(array.shape), array.size) for name, array in bundle.arrays.items()]
    return ModelSummary(
        path=str(bundle.path),
        family=bundle.config.family,
        fields=asdict(bundle.config),
        parameters=parameters,
        n_parameters=sum(count for _, _, count in parameters),
        n_embedding_parameters=sum(n for name, _, n in parameters if "embedding" in name),
        weight_bytes=sum(array.nbytes for array in bundle.arrays.values()),
        cache_bytes_per_token=bundle.config.cache_bytes_per_token,
    )
