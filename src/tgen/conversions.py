"""A model's weights for other Python programs: arrays, tensors, a model of transformers."""

import json
from importlib.util import find_spec
from typing import Any, Literal

from tgen.checkpoint import model_dir
from tgen.checkpoint.dtypes import to_float32
from tgen.checkpoint.hf import tensor_names
from tgen.checkpoint.model_dir import ModelBundle
from tgen.errors import UsageError


def weights(bundle: ModelBundle, kind: Literal["numpy", "torch"] = "numpy") -> dict[str, Any]:
    """Every weight in float32, by transformers' names, read again; raises ModelError where the
    model has changed since, UsageError for another `kind`."""
    if kind not in ("numpy", "torch"):
        raise UsageError(f"weights of kind {kind!r} are unknown", "ask for numpy or torch")
    wide = {name: to_float32(array) for name, array in model_dir.reload(bundle).arrays.items()}
    stored = tensor_names.to_layout(bundle.config, wide)
    prefix = "transformer." if bundle.config.family in ("classic", "gpt2") else ""  # files lack it
    arrays = {name if name == "lm_head.weight" else prefix + name: a for name, a in stored.items()}
    if kind == "numpy":
        return arrays
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def to_transformers(bundle: ModelBundle) -> Any:
    """The model as one of transformers, float32, on the processor; raises UsageError without it."""
    if find_spec("transformers") is None:
        raise UsageError("there is no transformers here", "pip install transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    described = json.loads(model_dir.descriptions(bundle.config, bundle.tokenizer)["config.json"])
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    missing, unexpected = model.load_state_dict(weights(bundle, "torch"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # which is the embedding where they are tied
    model.tie_weights()
    return model.eval()
