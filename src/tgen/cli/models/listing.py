"""All models that can be found by name, as their files describe them. Weights are not read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tgen.errors import TgenError
from tgen.reports.models import ModelReport


def describe_models(models: Path = Path("models")) -> Iterator[ModelReport]:
    """Yield each model in the order of the search; one that cannot be loaded, with the reason."""
    from tgen.checkpoint.model_lookup import find_model, list_models

    try:
        default: Path | None = find_model(None, models=models).path
    except TgenError:  # ./models cannot be read
        default = None
    for name, (path, found_by) in list_models(models).items():
        yield describe_model(path, name=name, found_by=found_by, is_default=path == default)


def describe_model(path: Path, *, name: str, found_by: str, is_default: bool) -> ModelReport:
    """Describe a model directory, an adapter or a GGUF file."""
    from tgen.checkpoint import model_dir
    from tgen.checkpoint.stored_models import is_adapter
    from tgen.lora import adapter

    adapter_of = rank = family = n_parameters = dtype = context_length = None
    problem = ""
    try:
        if is_adapter(path):
            adapter_of, rank, counts = adapter.describe(path)
            config, _ = model_dir.describe(adapter.find_base(path))
        else:
            config, counts = model_dir.describe(path)
        family, context_length = config.family, config.context_length
        n_parameters, dtype = counts.total(), max(counts, key=lambda one: counts[one])
    except TgenError as error:
        problem = error.message
    except OSError as error:
        problem = error.strerror or str(error)
    return ModelReport(
        name=name,
        path=str(path),
        found_by=found_by,
        is_default=is_default,
        adapter_of=adapter_of,
        rank=rank,
        family=family,
        n_parameters=n_parameters,
        dtype=dtype,
        context_length=context_length,
        n_bytes=sum(status.st_size for status in _files(path).values()),
        modified=_modified(path),
        problem=problem,
    )


def _modified(path: Path) -> float | None:
    """Return when the weights were written; of a model without weights, its newest file."""
    times = {name: status.st_mtime for name, status in _files(path).items()}
    weights = [time for name, time in times.items() if name.endswith((".safetensors", ".gguf"))]
    return max(weights or times.values(), default=None)


def _files(path: Path) -> dict[str, os.stat_result]:
    """Return the status of all files of a model, its training state included, by path.

    Links to files count as the files: cached models consist of links.
    """
    if not path.is_dir():
        paths = [str(path)]
    else:
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    found = {}
    for one in paths:
        try:
            found[one] = os.stat(one)
        except OSError:  # a broken link, or removed meanwhile
            continue
    return {name: status for name, status in found.items() if stat.S_ISREG(status.st_mode)}
