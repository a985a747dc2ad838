"""A model's weights for other Python programs: NumPy arrays, tensors, a transformers model."""

import json
from importlib.util import find_spec
from typing import Any, Literal

from tgen.checkpoint import model_dir
from tgen.checkpoint.dtypes import to_float32
from tgen.checkpoint.hf import tensor_names
from tgen.checkpoint.model_dir import ModelBundle
from tgen.errors import UsageError


def weights(bundle: ModelBundle, kind: Literal["numpy", "torch"] = "numpy") -> dict[str, Any]:
    """Read all weights again, as float32 arrays or tensors by transformers' parameter names.

    Raises ModelError if the model has changed since it was loaded, UsageError for another `kind`.
    """
    if kind not in ("numpy", "torch"):
        raise UsageError(f"unknown kind of weights {kind!r}", "choose numpy or torch")
    wide = {name: to_float32(array) for name, array in model_dir.reload(bundle).arrays.items()}
    stored = tensor_names.to_hf_arrays(bundle.config, wide)
    # files of these families lack the prefix that their parameters have
    prefix = "transformer." if bundle.config.family in ("classic", "gpt2") else ""
    arrays = {name if name == "lm_head.weight" else prefix + name: a for name, a in stored.items()}
    if kind == "numpy":
        return arrays
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def to_transformers(bundle: ModelBundle) -> Any:
    """Return a transformers model in float32 on the CPU; raises UsageError without transformers."""
    if find_spec("transformers") is None:
        raise UsageError("transformers is not installed", "pip install transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    contents = model_dir.build_metadata_files(bundle.config, bundle.tokenizer)
    config = AutoConfig.for_model(**json.loads(contents["config.json"]))
    model: Any = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(weights(bundle, "torch"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    model.tie_weights()
    return model.eval()
