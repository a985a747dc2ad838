"""The base model of a fine-tuning run and, with LoRA, an adapter on it.

The states of a LoRA run have the adapter alone, so a resumed run finds the base again, by its path
or its name, and checks its digest.
"""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import CHECKPOINT, PATH, WEIGHTS_DIRECTORY, find_model
from tgen.checkpoint.stored_models import is_adapter
from tgen.config import ModelConfig
from tgen.config.training import TrainConfig
from tgen.errors import TgenError, TrainingError, UsageError
from tgen.lora import adapter as adapters
from tgen.lora import adapter_base, model_with_adapter
from tgen.lora.matrices import Pair, new_shapes
from tgen.lora.merging import describe as describe_extras
from tgen.planning.costs import FrozenModel
from tgen.runs import saved_state as run_state
from tgen.runs.request import RunRequest
from tgen.runs.run_record import AdapterRecord


@dataclass(frozen=True)
class Base:
    """The model that a run starts from, the adapter that it continues, and the text whose loss is
    compared; or nothing."""

    bundle: model_dir.ModelBundle | None = None
    pairs: dict[str, Pair] | None = None
    adapter: AdapterRecord | None = None  # of a LoRA run
    general: bytes = b""

    @property
    def config(self) -> ModelConfig | None:
        """The model's configuration."""
        return None if self.bundle is None else self.bundle.config

    @property
    def weights(self) -> Mapping[str, NDArray[Any]] | None:
        """The model's arrays."""
        return None if self.bundle is None else self.bundle.arrays

    @cached_property
    def frozen(self) -> FrozenModel | None:
        """The model as the plan counts it if only an adapter is trained."""
        if self.adapter is None or self.bundle is None:
            return None
        return self.adapter.frozen_model(self.bundle.config, self.bundle.arrays)


def open_base(request: RunRequest, config: TrainConfig) -> tuple[Base, TrainConfig]:
    """Load the model of --from and the adapter of --adapter; return them and the configuration
    with the adapter's rank.

    Raises UsageError for options that contradict each other, and ModelError as the readers do.
    """
    start_from, adapter_name = request.start_from, request.adapter
    if start_from is None and adapter_name is None:
        if config.lora is not None:
            raise UsageError("--lora needs --from", "name the base model with --from")
        return Base(), config
    if adapter_name is not None and config.lora is not None:
        hint = "remove --lora: the adapter has a rank"
        raise UsageError("--adapter cannot be combined with --lora", hint)
    if adapter_name is not None and (given := {"lora_alpha", "lora_targets"} & {*config.changed}):
        name = min(given)
        hint = f"remove {name}: the adapter has its own"
        raise UsageError(f"{name} cannot be combined with --adapter", hint, field=name)
    if request.ngrams and (adapter_name or config.lora):
        raise UsageError("--ngrams cannot be combined with LoRA", "remove --ngrams")
    path = None if adapter_name is None else adapters.find_adapter(str(adapter_name))
    name, base_path = _find_base(start_from, path)
    if path is None and config.lora is not None and is_adapter(base_path):
        quoted = shlex.quote(str(start_from))
        raise UsageError(
            f"--lora cannot be combined with --from {start_from}, which is an adapter",
            f"continue it with --adapter {quoted}, or merge it: tgen export "
            f"{quoted} --merge --to transformers --out DIR",
        )
    bundle = model_with_adapter.load(base_path)
    if path is None and config.lora is None:
        return Base(bundle), config
    pairs: dict[str, Pair] | None = None
    if path is not None:
        adapter = adapters.read(path, bundle.config, model=bundle.path)
        if adapter.extras is not None:
            raise UsageError(
                f"the adapter {str(path)!r} has {describe_extras(adapter.extras)}, which cannot be "
                "trained further",
                f"merge it: tgen export {shlex.quote(str(path))} --merge --to transformers "
                "--out DIR, and start from DIR",
            )
        warnings = adapters.check_base(adapter, bundle.path, bundle.arrays)
        bundle = replace(bundle, warnings=(*bundle.warnings, *warnings))
        bundle = model_with_adapter.with_settings_of(bundle, path)
        shapes, pairs = adapter.shapes, adapter.pairs
        ranks = [shape.rank for shape in shapes.values()]
        config = replace(config, lora=max(set(ranks), key=ranks.count))
        first = next(shape for shape in shapes.values() if shape.rank == config.lora)
        config = replace(config, lora_alpha=first.scale * first.rank)
    else:
        assert config.lora is not None
        shapes = new_shapes(bundle.config, config.lora, config.lora_alpha, config.lora_targets)
    record = AdapterRecord(
        base=name,
        base_path=str(bundle.path.resolve()),
        base_digest="",  # see `dequantize_base`: after the plan, since it takes seconds
        alpha=config.lora_alpha,
        ranks={name: shape.rank for name, shape in shapes.items()},
        scales={name: shape.scale for name, shape in shapes.items()},
    )
    return Base(bundle, pairs, record), config


def dequantize_base(
    record: AdapterRecord, arrays: Mapping[str, NDArray[Any]]
) -> tuple[AdapterRecord, dict[str, NDArray[Any]]]:
    """Return the record with the digest of the base model, and its arrays as floats."""
    floats = _dequantize(arrays)
    return replace(record, base_digest=adapter_base.base_digest(floats)), floats


def load_base(
    record: AdapterRecord, moved_to: Path | None = None
) -> tuple[AdapterRecord, dict[str, NDArray[Any]]]:
    """Return the arrays of a run's base model, and the record with the path where it is now.

    Raises TrainingError if it is gone or changed, ModelError if no model is where it `moved_to`.
    """
    looked_at: list[Path] = []
    if moved_to is not None:
        base, path = _find_base(moved_to, None)
        record = replace(record, base=base, base_path=str(path.resolve()))
    for name in (record.base_path, record.base):
        with suppress(TgenError):
            path = find_model(name).path
            if path in looked_at:
                continue
            looked_at.append(path)
            arrays = _dequantize(model_with_adapter.load(path).arrays)
            if adapter_base.base_digest(arrays) == record.base_digest:
                return record, arrays
    where = record.base_path
    if record.base != where:
        where += f" (--from {record.base})"
    what = "has changed" if looked_at else "is missing"
    raise TrainingError(
        f"the base model {where} of this run {what}",
        "restore it, or name it where it is now with --from: the states have the adapter only",
    )


def _dequantize(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return arrays of floats: of a quantized file once, for the digest and for training."""
    return {name: np.asarray(array) for name, array in arrays.items()}


def source_optimizer(path: Path) -> str | None:
    """Return the optimizer that trained a model, if tgen did."""
    try:
        values, _ = run_state.load_record(path)
        return str(values["plan"]["train"]["optimizer"])
    except (TgenError, OSError, KeyError, TypeError):
        return None


def _find_base(start_from: Path | None, adapter: Path | None) -> tuple[str, Path]:
    """Return the base model's name for adapter_config.json, and its path."""
    if start_from is None:
        assert adapter is not None
        path = adapter_base.find_base(adapter, option="--from")
        return adapter_base.base_name(adapter) or str(path.resolve()), path
    path, found_by = find_model(str(start_from))
    by_path = (PATH, CHECKPOINT, WEIGHTS_DIRECTORY)
    if is_adapter(path):
        adapter_base.find_base(path, option="--from")  # its error names the option of this command
    return str(path.resolve()) if found_by in by_path else str(start_from), path
