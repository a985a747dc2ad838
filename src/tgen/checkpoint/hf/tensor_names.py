"""Transformers' tensors: names and shapes, both ways, and the other spellings in files.

tgen's own tensor names are the keys of `Transformer.state_dict()`. A `TensorMapping` lists the
transformers tensors that contain some of them, and how.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from numpy.typing import NDArray

from tgen.checkpoint.hf.families import FAMILY_LAYOUTS
from tgen.checkpoint.tensor_mapping import Shape, TensorMapping, shapes_by_name
from tgen.config import ModelConfig
from tgen.errors import ModelError
from tgen.model.rope import sinusoid

Arrays = dict[str, NDArray[Any]]

# Masks and tables that some versions of transformers saved with the weights.
_NOT_WEIGHTS = re.compile(
    r"(.*\.)?(attn|attention)\.(attention\.)?(masked_)?bias|(.*\.)?rotary_emb\.\w*inv_freq"
    r"|.*position_ids"
)
_PREFIX = "transformer."
_OTHER_MODELS = {  # parts of tensor names that tell what a file contains besides or instead
    "vision": "the image part of a model; use its text-only version",
    "multi_modal": "the image part of a model; use its text-only version",
    "lora_": "an adapter; merge it into its base model first",
    "adapter": "an adapter; merge it into its base model first",
    "base_model.model.": "an adapter; merge it into its base model first",
    "_orig_mod.": "a compiled model; save the module that was compiled",
    "score.weight": "a classifier; use the language model that it was made from",
    "experts.": "a mixture of experts; use a dense model",
    "module.": "a model inside DistributedDataParallel; save the module in it",
}
_SINUSOID = FAMILY_LAYOUTS["classic"].names["position_embedding"] + ".weight"
# Modules that hold a whole model: DistributedDataParallel's, and that of torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")
# The language model inside a model with images, in version 5 of transformers and before.
_TEXT_PARTS = {"model.language_model.": "model.", "language_model.": ""}
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}
_NORMS = {  # of a block, by their placement
    "output": ("attention_output_norm", "feed_forward_output_norm"),
    "sandwich": ("attention_norm", "attention_output_norm", "feed_forward_norm",
                 "feed_forward_output_norm"),
    "shared": ("attention_norm",),
}  # fmt: skip


def tensor_mappings(config: ModelConfig) -> list[TensorMapping]:
    """Return the mappings of all tensors that a weights file must contain; the first is the token
    embedding."""
    C, V = config.d_model, config.vocab_size
    names = FAMILY_LAYOUTS[config.family].names
    mappings = [_mapping("token_embedding", names["token_embedding"], (V, C))]
    if config.position == "learned":
        shape = (config.context_length, C)
        mapping = _mapping("position_embedding", names["position_embedding"], shape)
        if unused := FAMILY_LAYOUTS[config.family].unused_positions:
            stored = ((config.context_length + unused, C),)
            mapping = mapping._replace(shapes=stored, unused_rows=unused)
        mappings.append(mapping)
    for layer in range(config.n_layers):
        mappings += _block(config, f"blocks.{layer}.", names["block"].format(layer))
    if not config.post_norm:
        mappings += _norm(config, "final_norm", names["final_norm"])
    if not config.tied_embeddings:
        mappings.append(_mapping("lm_head", names["lm_head"], (V, C)))
    if config.head_bias:
        mappings.append(_mapping("lm_head", names["lm_head"], (V,), "bias"))
    return mappings


def head_name(config: ModelConfig) -> str:
    """Return the name of the LM head in files."""
    return FAMILY_LAYOUTS[config.family].names["lm_head"] + ".weight"


def _mapping(ours: str, theirs: str, shape: Shape, part: str = "weight") -> TensorMapping:
    return TensorMapping((f"{ours}.{part}",), shape[:1], (f"{theirs}.{part}",), (shape,))


def _block(config: ModelConfig, ours: str, theirs: str) -> list[TensorMapping]:
    C, F, D = config.d_model, config.d_ff, config.head_dim
    n_q, n_kv = config.n_heads * D, config.n_kv_heads * D
    layout = FAMILY_LAYOUTS[config.family]
    names = layout.names
    gate = ["gate_proj"] if config.gated else []
    matrices = [  # ours with their rows, the sizes of theirs, inputs, bias
        (["attention.qkv_proj"], [n_q + 2 * n_kv], [n_q, n_kv, n_kv], C, config.attention_bias),
        (["attention.o_proj"], [C], [C], n_q, config.output_bias),
        *((["feed_forward." + n], [F], [F], C, config.feed_forward_bias) for n in gate),
        (["feed_forward.up_proj"], [F], [F], C, config.feed_forward_bias),
        (["feed_forward.down_proj"], [C], [C], F, config.feed_forward_bias),
    ]
    if layout.fused_gate:
        both = [f"feed_forward.{name}" for name in ("gate_proj", "up_proj")]
        matrices[2:4] = [(both, [F, F], [2 * F], C, config.feed_forward_bias)]
    mappings = []
    for stacked, rows, sizes, n_in, bias in matrices:
        is_qkv = stacked == ["attention.qkv_proj"]
        parts = names[stacked[0].rpartition(".")[2]].split()
        sizes = sizes if len(parts) == len(sizes) else [sum(sizes)]
        by_head = is_qkv and layout.interleaved_qkv and n_q == n_kv
        heads = config.n_heads if by_head else 0
        neighbors = is_qkv and layout.rotates_neighbors
        for part in ["weight"] + ["bias"] * bias:
            mappings.append(
                TensorMapping(
                    tuple(f"{ours}{name}.{part}" for name in stacked),
                    tuple(rows),
                    tuple(f"{theirs}{name}.{part}" for name in parts),
                    tuple(_shape(n, n_in, part, layout.transposed) for n in sizes),
                    layout.transposed and part == "weight",
                    heads,
                    (config.n_heads, config.n_kv_heads, 0) if neighbors else (),
                    config.n_rotated,
                )
            )
    for norm in _NORMS.get(config.norm_placement, ("attention_norm", "feed_forward_norm")):
        mappings += _norm(config, ours + norm, theirs + names[norm])
    if config.qk_norm:
        sizes = [n_q, n_kv] if config.qk_norm_over_heads else [D, D]
        for norm, size in zip(("q_norm", "k_norm"), sizes, strict=True):
            mappings.append(_mapping(f"{ours}attention.{norm}", theirs + names[norm], (size,)))
    return mappings


def _shape(n_out: int, n_in: int, part: str, transposed: bool) -> Shape:
    if part == "bias":
        return (n_out,)
    return (n_in, n_out) if transposed else (n_out, n_in)


def _norm(config: ModelConfig, ours: str, theirs: str) -> list[TensorMapping]:
    parts = ["weight"] if config.norm == "rms_norm" else ["weight", "bias"]
    parts = parts[: {"none": 0, "weight": 1, "all": 2}[config.norm_parameters]]
    return [_mapping(ours, theirs, (config.d_model,), part) for part in parts]


def to_hf_arrays(config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Rename and split tgen's arrays to the tensors of a file of transformers; contiguous."""
    out: Arrays = {}
    for mapping in tensor_mappings(config):
        out |= mapping.to_theirs(arrays)
    if config.position == "sinusoidal":  # transformers stores the table that tgen computes
        out[_SINUSOID] = sinusoid(config.context_length, config.d_model)
    if _may_lack_prefix(config) and (config.head_bias or not config.tied_embeddings):
        # Version 4 refuses a file with a head and names without the prefix.
        out = {full_name(config, name): array for name, array in out.items()}
    return out


def full_name(config: ModelConfig, name: str) -> str:
    """Return the name in transformers' models of a tensor of `to_hf_arrays`."""
    head = FAMILY_LAYOUTS[config.family].names["lm_head"] + "."
    if not _may_lack_prefix(config) or name.startswith(head):
        return name
    return _PREFIX + name.removeprefix(_PREFIX)


def _may_lack_prefix(config: ModelConfig) -> bool:
    return config.family in ("classic", "gpt2", "gpt_neo", "gpt_bigcode", "gptj")


def from_hf_arrays(config: ModelConfig, arrays: Arrays) -> Arrays:
    """Rename and stack transformers' tensors to tgen's, emptying `arrays`; `check_shapes` has
    passed."""
    out: Arrays = {}
    for mapping in tensor_mappings(config):
        out |= mapping.to_ours([arrays.pop(name) for name in mapping.theirs])
    return out


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Return the usual name of each tensor by its name in a file; of a model with images, those of
    its language model alone."""
    plain = dict(zip(names, names, strict=True))
    while prefix := _shared_prefix(plain.values()):
        plain = {name: usual.removeprefix(prefix) for name, usual in plain.items()}
    parts = {
        name: _TEXT_PARTS[prefix] + usual.removeprefix(prefix)
        for name, usual in plain.items()
        if (prefix := next((p for p in _TEXT_PARTS if usual.startswith(p)), None))
    }
    if parts:
        head = {name: usual for name, usual in plain.items() if usual == "lm_head.weight"}
        plain = head | parts
    for old, new in _OLD_ENDINGS.items():
        plain = {
            name: usual.removesuffix(old) + new if usual.endswith(old) else usual
            for name, usual in plain.items()
        }
    return plain


def _shared_prefix(names: Collection[str]) -> str | None:
    return next((p for p in _WRAPPERS if names and all(n.startswith(p) for n in names)), None)


def names_in_file(config: ModelConfig, names: Collection[str]) -> tuple[dict[str, str], bool]:
    """Return the names as in `tensor_mappings` of a file's tensors, and whether the file lacks the
    prefix of a model with a head: it does if only the model below the head was saved."""
    first = FAMILY_LAYOUTS[config.family].names["token_embedding"] + ".weight"
    if _may_lack_prefix(config):
        lacks = _PREFIX + first not in names
        return {name: name.removeprefix(_PREFIX) for name in names}, lacks
    prefix = first.partition(".")[0] + "."
    lacks = first not in names and first.removeprefix(prefix) in names
    return {name: prefix * lacks + name for name in names}, lacks


def check_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Raise ModelError with the first differences if these are not the model's tensors."""
    hint = "download or train the model again: the directory mixes two models or is damaged"
    expected = shapes_by_name(tensor_mappings(config))
    head = head_name(config)
    optional = {head} if config.tied_embeddings else set()
    if optional & shapes.keys():  # it is compared with the embedding
        expected[head] = (config.vocab_size, config.d_model)
    if config.position == "sinusoidal":
        optional.add(_SINUSOID)
    optional |= {name for name in shapes if _NOT_WEIGHTS.fullmatch(name)}
    for name in sorted(shapes.keys() - expected.keys()):
        for part, explanation in _OTHER_MODELS.items():
            if part in name:
                what, _, remedy = explanation.partition("; ")
                raise ModelError(f"the weights contain {what} ({name[:200]})", remedy)
    if differences := describe_differences(expected, shapes, optional):
        raise ModelError(f"weights and config.json disagree: {differences}", hint)


def describe_differences(
    expected: Mapping[str, Shape], shapes: Mapping[str, Shape], optional: set[str]
) -> str:
    """Return the first 5 differences between a model's tensors and a file's; empty if none."""
    differences = [f"{name} is missing" for name in expected if name not in shapes]
    differences += [
        f"{name} has shape {list(shapes[name])} (expected {list(shape)})"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    extra = [name for name in shapes if name not in expected and name not in optional]
    differences += [f"{name} is not part of the model" for name in extra]
    more = f" (and {len(differences) - 5} more)" if len(differences) > 5 else ""
    return "; ".join(differences[:5]) + more
