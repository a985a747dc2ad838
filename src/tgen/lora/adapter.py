"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

tgen reads the adapters of other programs, and writes only keys that every version of PEFT knows.
PEFT accepts an adapter for any base model of the same shapes; therefore tgen stores the digest of
the base in the metadata of the safetensors file, and refuses another base.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import safetensors_file
from tgen.checkpoint.dtypes import to_float32
from tgen.checkpoint.hf import tensor_names
from tgen.checkpoint.model_lookup import UnknownModelError, find_model, list_models
from tgen.checkpoint.stored_models import (
    ADAPTER_CONFIG,
    ADAPTER_TORCH_WEIGHTS,
    ADAPTER_WEIGHTS,
    is_adapter,
    join_names,
)
from tgen.checkpoint.tensor_mapping import TensorMapping
from tgen.config import ModelConfig
from tgen.errors import ModelError
from tgen.lora.adapter_base import (
    base_digest,
    base_name,
    check_is_adapter,
    is_base,
    named_base,
    read_settings,
)
from tgen.lora.matrices import Pair, Part, Shape, adapter_layout, check_rank
from tgen.lora.merging import BASE_HINT, Extras, split_name
from tgen.machine.memory import check_ram
from tgen.storage import files

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_BASE_DIGEST = "base_sha256"  # in the file's metadata
# Keys with any value: they do not change what the tensors mean.
_NO_EFFECT = {
    "inference_mode", "revision", "auto_mapping", "peft_version", "lora_dropout", "loftq_config",
    "megatron_core", "qalora_group_size", "velora_config", "layers_to_transform", "layers_pattern",
    "exclude_modules", "fan_in_fan_out", "target_modules", "base_model_name_or_path",
    "ensure_weight_tying",
}  # fmt: skip
_READ = {"peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
         "init_lora_weights", "use_dora", "modules_to_save", "trainable_token_indices",
         "lora_bias"}  # fmt: skip
_PASS = {"bias": ("none", "all", "lora_only")}  # further values: the tensors say the same
_CHANGES_BASE = re.compile(r"(pissa|olora|corda|loftq|lora_ga)")  # values of init_lora_weights
# May take exponential time; with (?x:, white space may hide that a quantifier follows a group.
_UNSAFE_PATTERN = re.compile(r"\s|[)\]][*+?{]|(.*[*+?{]){3}")
_MERGE_HINT = "merge it into its base model with PEFT's merge_and_unload, and use the result"
_NOT_MERGED = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING",
               "ADAPTION_PROMPT", "CPT")  # fmt: skip
_DAMAGED = "save the adapter again: the file is damaged or incomplete"


Header = dict[str, safetensors_file.TensorEntry]


class _OtherShapeError(ModelError):
    """A pair that does not fit its matrix in the model."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read: its pairs by transformers' names of the matrices."""

    path: Path
    base: str | None  # name or path of the base model
    base_digest: str | None  # see `base_digest`; None: not made by tgen
    pairs: dict[str, Pair]  # the rows of B in the order of our matrices; none with `extras`
    extras: Extras | None = None  # all that it has, if it has more than pairs

    @property
    def shapes(self) -> dict[str, Shape]:
        """The rank and scale of each pair."""
        return {name: Shape(len(pair.a), pair.scale) for name, pair in self.pairs.items()}


def find_adapter(name: str) -> Path:
    """Return the path of an adapter by its path or name.

    Raises ModelError with the known adapters if it does not exist, or if it is a model.
    """
    try:
        path = find_model(name).path
    except UnknownModelError as error:
        known = [name for name, location in list_models().items() if is_adapter(location.path)]
        raise ModelError(
            f"adapter{error.message.removeprefix('model')}",
            f"choose one of these adapters: {join_names(known)}"
            if known
            else "train one with `tgen train --lora`",
        ) from None
    check_is_adapter(path)
    return path


def read(path: Path, config: ModelConfig, *, model: Path | None = None) -> Adapter:
    """Read an adapter for a model of this shape; errors name the `model`.

    Raises ModelError if it is damaged, does not fit the model, or has something that LoRA does not.
    """
    values = read_settings(path)
    _check_config(path, values)
    weights, header = _read_header(path)
    sites = {part.pair: part for parts in adapter_layout(config).values() for part in parts}
    base = named_base(values)
    head = tensor_names.full_name(config, tensor_names.head_name(config)).removesuffix(".weight")
    try:
        more = [name for name in header if _is_extra(weights, name, sites, head)]
        safetensors_file.check_float_dtypes(weights, header)
        _check_announced(path, values, header)
        if more:
            digest = _read_metadata(weights).get(_BASE_DIGEST)
            return Adapter(path, base, digest, {}, _read_extras(path, values, weights, header))
        ranks = _ranks(weights, values, header, sites)
    except _OtherShapeError as error:
        has_digest = _BASE_DIGEST in _read_metadata(weights)
        if model is None or (not has_digest and is_base(path, model)):
            raise
        raise _other_base_error(path, model, error.message.removeprefix(f"{weights}: ")) from None
    arrays = safetensors_file.read_arrays(weights, header)
    safetensors_file.check_finite(weights, arrays)
    mappings = _mappings(config)
    pairs = {}
    for name, rank in ranks.items():
        a, b = (to_float32(arrays[_tensor_name(name, which)]) for which in "AB")
        scale = _scale(path, values, name, rank)
        mapping, i = mappings[name]
        pairs[name] = Pair(a, mapping.rows_to_ours(i, b), scale)
    return Adapter(path, base, _read_metadata(weights).get(_BASE_DIGEST), pairs)


def _read_header(path: Path) -> tuple[Path, Header]:
    """Return the file of an adapter's weights, and its tensors."""
    from tgen.checkpoint import model_dir  # slow: tokenizers

    for name in (ADAPTER_WEIGHTS, ADAPTER_TORCH_WEIGHTS):
        if (file := path / name).is_file():
            return file, model_dir.read_header(file)
    raise ModelError(f"{str(path)!r} has no {ADAPTER_WEIGHTS}", _weights_hint(path))


def _read_metadata(weights: Path) -> dict[str, str]:
    return safetensors_file.read_metadata(weights) if weights.name == ADAPTER_WEIGHTS else {}


def _check_announced(path: Path, values: Mapping[str, Any], header: Header) -> None:
    """Raise ModelError if the configuration has something that the tensors lack."""
    found: dict[str, set[str]] = {}
    for module, part in (split_name(name.removeprefix(_PREFIX)) for name in header):
        found.setdefault(part, set()).add(module)
    needed = {
        "use_dora": ("magnitude", {*found.get("a", ()), *found.get("embedding a", ())}),
        "lora_bias": ("pair bias", found.get("a", set())),
        "trainable_token_indices": ("rows", set()),
        "modules_to_save": ("weight", set()),
    }
    for key, (part, modules) in needed.items():
        has = found.get(part, set())
        if (bool(values.get(key)) != bool(has) and part != "weight") or (modules - has and has):
            raise ModelError(
                f"{path / ADAPTER_CONFIG}: {key} and the tensors disagree", "save the adapter again"
            )
        if values.get(key) and not has:
            raise ModelError(f"{str(path)!r} lacks the tensors of {key}", "save the adapter again")


def _read_extras(path: Path, values: Mapping[str, Any], weights: Path, header: Header) -> Extras:
    """Read all tensors of an adapter with more than pairs."""
    check_ram(sum(entry.end - entry.start for entry in header.values()), f"loading {str(path)!r}")
    arrays = safetensors_file.read_arrays(weights, header)
    safetensors_file.check_finite(weights, arrays)
    parts: dict[str, dict[str, NDArray[np.float32]]] = {}
    for name, array in arrays.items():
        module, part = split_name(name.removeprefix(_PREFIX))
        if part in parts.setdefault(module, {}):
            raise ModelError(f"{weights}: {name[:200]} is there twice", "save the adapter again")
        parts[module][part] = to_float32(array)
    scales = {}
    for module, own in parts.items():
        for one, other in (("a", "b"), ("embedding a", "embedding b")):
            if (one in own) != (other in own):
                message = f"{weights}: {module[:200]} has only one matrix of a pair"
                raise ModelError(message, _DAMAGED)
        if (a := own.get("a", own.get("embedding a"))) is not None:
            b = own.get("b", own.get("embedding b", a))
            if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
                shapes = f"{list(a.shape)} and {list(b.shape)}"
                message = f"{weights}: the pair of {module[:200]} has the shapes {shapes}"
                raise ModelError(message, _DAMAGED)
            scales[module] = _scale(path, values, module, len(a))
    separate, ids = values.get("modules_to_save"), values.get("trainable_token_indices")
    return Extras(
        parts,
        scales,
        ids if isinstance(ids, dict | list) else [],
        separate if isinstance(separate, list) else [],
    )


def _scale(path: Path, values: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = _number(path, values, "lora_alpha", "alpha_pattern", name)
    return alpha / (math.sqrt(rank) if values.get("use_rslora") else max(rank, 1))


def describe(path: Path) -> tuple[str | None, int | None, Counter[str]]:
    """Return the name of an adapter's base, its rank and the number of its parameters by type,
    without its weights. Raises ModelError."""
    weights, header = _read_header(path)
    values = read_settings(path)
    counts: Counter[str] = Counter()
    safetensors_file.check_float_dtypes(weights, header)
    for entry in header.values():
        counts[safetensors_file.FLOATS[entry.dtype]] += math.prod(entry.shape)
    if not counts:
        raise ModelError(f"{weights} has no tensors", "save the adapter again")
    rank = values.get("r")
    return named_base(values), rank if type(rank) is int else None, counts


def check_base(adapter: Adapter, base: Path, arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    """Raise ModelError if the adapter was trained on another model than these arrays.

    Returns warnings: without a digest, another name may mean another base.
    """
    if adapter.base_digest is not None:
        if adapter.base_digest != base_digest(arrays):
            raise _other_base_error(adapter.path, base, "their weights differ")
        return []
    if adapter.base is not None and Path(adapter.base).name != base.resolve().name:
        named = f"names the base {adapter.base[:200]!r}, and {str(base)!r} is used"
        return [f"the adapter {str(adapter.path)!r} {named}"]
    return []


def _other_base_error(path: Path, model: Path, difference: str) -> ModelError:
    """Return the error for an adapter that was trained on other weights than those of `model`."""
    if is_base(path, model):
        return ModelError(
            f"the base model {str(model)!r} has changed since the adapter {str(path)!r} was "
            f"trained: {difference}",
            "restore the base model, or train the adapter again",
        )
    trained_on = repr((base_name(path) or "another model")[:200])
    return ModelError(
        f"the adapter {str(path)!r} was trained on {trained_on}, not on {str(model)!r}: "
        f"{difference}",
        BASE_HINT,
    )


def build_files(
    config: ModelConfig,
    pairs: Mapping[str, Pair],
    *,
    base: str,
    digest: str,
    alpha: float,
) -> dict[str, files.Content]:
    """Return the contents of an adapter's two files; B of a scale that is not alpha / rank is
    multiplied with the difference."""
    mappings = _mappings(config)
    arrays: dict[str, NDArray[Any]] = {}
    for name, pair in pairs.items():
        factor = pair.scale * len(pair.a) / alpha
        b = pair.b if factor == 1 else pair.b * np.float32(factor)
        arrays[_tensor_name(name, "A")] = pair.a
        mapping, i = mappings[name]
        b = mapping.rows_to_theirs(i, b)
        arrays[_tensor_name(name, "B")] = np.ascontiguousarray(b)
    ranks = [len(pair.a) for pair in pairs.values()]
    main = max(set(ranks), key=lambda rank: (ranks.count(rank), rank))
    values: dict[str, Any] = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": any(m.transposed for m in tensor_names.tensor_mappings(config)),
        "inference_mode": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": main,
        "target_modules": _target_modules(config, pairs),
        "task_type": "CAUSAL_LM",
    }
    if len(set(ranks)) > 1:
        others = {name: len(pair.a) for name, pair in pairs.items() if len(pair.a) != main}
        values["rank_pattern"] = {re.escape(name): rank for name, rank in others.items()}
    content = json.dumps(dict(sorted(values.items())), indent=2) + "\n"
    metadata = {"format": "pt", _BASE_DIGEST: digest}
    weights = safetensors_file.serialize_in_parts(arrays, metadata=metadata)
    return {ADAPTER_CONFIG: content.encode(), ADAPTER_WEIGHTS: weights}


def _check_config(path: Path, values: Mapping[str, Any]) -> None:
    file = path / ADAPTER_CONFIG
    if "fine_tune_type" in values or (path / "adapters.safetensors").exists():
        raise ModelError(
            f"{str(path)!r} was made by mlx-lm, whose adapters have another format",
            "fuse it with mlx_lm.fuse, and use the result",
        )
    kind = values.get("peft_type")
    if kind != "LORA":
        hint = "use a LoRA adapter" if kind in _NOT_MERGED else _MERGE_HINT
        raise ModelError(f"{file}: peft_type {str(kind)[:50]!r} is not LORA", hint)
    task = values.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        hint = "use an adapter of a language model"
        raise ModelError(f"{file}: task_type {str(task)[:50]!r} is not CAUSAL_LM", hint)
    start = values.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.match(start):
        message = f"{file}: init_lora_weights {start[:50]!r} changes the base model"
        raise ModelError(message, "convert it with PEFT's path_initial_model_for_weight_conversion")
    for key, value in values.items():
        passes = value in (None, False, {}, []) or value in _PASS.get(key, ())
        if key not in _NO_EFFECT | _READ and not passes:
            raise ModelError(f"{file}: {key[:50]} is not supported", _MERGE_HINT)


def _is_extra(file: Path, name: str, sites: Mapping[str, Part], head: str) -> bool:
    """Return whether a tensor is something else than a pair of a matrix in the blocks; raises
    ModelError for tensors that belong to no adapter of this model."""
    match = _TENSOR.fullmatch(name)
    if match and match[1] in sites:
        return False
    shown = name[:200]
    if not name.startswith(_PREFIX):
        if ".lora_" in name:
            raise ModelError(
                f"{file}: {shown} lacks the prefix {_PREFIX}",
                "save it with PEFT's save_pretrained",
            )
        raise ModelError(f"{file}: {shown} is not part of a LoRA adapter", _MERGE_HINT)
    if not match or match[1] == head:
        return True
    raise _OtherShapeError(f"{file}: the model has no matrix {match[1][:200]}", BASE_HINT)


def _ranks(
    file: Path, values: Mapping[str, Any], header: Header, sites: Mapping[str, Part]
) -> dict[str, int]:
    """Return the rank of each pair in a file of weights, after checking all shapes."""
    ranks = {}
    names = dict.fromkeys(match[1] for match in map(_TENSOR.fullmatch, header) if match)
    if not names:
        raise ModelError(f"{file} has no tensors", _DAMAGED)
    for name in names:
        part = sites[name]
        for which, other in ("AB", "BA"):
            if _tensor_name(name, which) not in header:
                message = f"{file}: {_tensor_name(name, other)} has no lora_{which}"
                raise ModelError(message, _DAMAGED)
        a, b = (header[_tensor_name(name, which)].shape for which in "AB")
        rank = _number(file.parent, values, "r", "rank_pattern", name)
        if len(a) != 2 or a[0] != rank:
            raise ModelError(
                f"{file}: {name}.lora_A has shape {list(a)} "
                f"(expected rank {rank:g} by {ADAPTER_CONFIG})",
                _DAMAGED,
            )
        expected = (int(rank), part.n_inputs), (part.pair_rows, int(rank))
        for which, shape, right in zip("AB", (a, b), expected, strict=True):
            if shape != right:
                message = f"{name}.lora_{which} has shape {list(shape)} (expected {list(right)})"
                raise _OtherShapeError(f"{file}: {message}", BASE_HINT)
        check_rank(int(rank), part, f"{file}: rank {rank:g}")
        ranks[name] = int(rank)
    return ranks


def _number(path: Path, values: Mapping[str, Any], key: str, pattern: str, name: str) -> float:
    """Return a positive number of the configuration, or of the first pattern that matches `name`;
    8 is PEFT's default."""
    file, patterns, value = path / ADAPTER_CONFIG, values.get(pattern) or {}, values.get(key, 8)
    if not isinstance(patterns, dict):
        raise ModelError(f"{file}: {pattern} is not an object", _MERGE_HINT)
    for expression, own in patterns.items():
        shown, hint = repr(expression[:100]), "use names of modules"
        if len(expression) > 300 or _UNSAFE_PATTERN.search(expression):
            raise ModelError(f"{file}: {pattern} has the expression {shown}", hint)
        try:
            matches = re.match(rf"(.*\.)?({expression})$", name)
        except re.error:
            message = f"{file}: {pattern} has an invalid expression {shown}"
            raise ModelError(message, hint) from None
        if matches:
            value = own
            break
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not 0 < value <= 1e9 or (key == "r" and value != int(value)):
        hint = "use a number above 0 and up to 1e9"
        raise ModelError(f"{file}: {key} is {str(value)[:50]}", hint)
    return float(value)


def _tensor_name(pair: str, which: str) -> str:
    return f"{_PREFIX}{pair}.lora_{which}.weight"


def _target_modules(config: ModelConfig, pairs: Mapping[str, Pair]) -> list[str]:
    """Return endings of the adapted modules or, if those mean others too, their full names."""
    every = {part.pair for parts in adapter_layout(config).values() for part in parts}
    for n in (1, 2):  # gpt2 has two c_proj
        ending = {name: ".".join(name.split(".")[-n:]) for name in every}
        endings = {ending[name] for name in pairs}
        if {name for name in every if ending[name] in endings} == pairs.keys():
            return sorted(endings)
    return sorted(pairs)


def _mappings(config: ModelConfig) -> dict[str, tuple[TensorMapping, int]]:
    """Return the mapping of each matrix, and which of its tensors the matrix is."""
    return {
        tensor_names.full_name(config, name).removesuffix(".weight"): (mapping, i)
        for mapping in tensor_names.tensor_mappings(config)
        for i, name in enumerate(mapping.theirs)
    }


def _weights_hint(path: Path) -> str:
    if others := sorted({*path.glob("*.bin"), *path.glob("*.pt*")}):
        return f"if {others[0].name} has the weights, rename it to {ADAPTER_TORCH_WEIGHTS}"
    if (path / "training" / "run.json").exists():
        out = shlex.quote(str(path))
        return f"run `tgen train --resume --out {out}`: the run writes its weights again"
    return "download the file too"
