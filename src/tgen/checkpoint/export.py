"""Exporting a model: to a GGUF file, or to a directory with another dtype or shard size.

Only a model is ever replaced, and what is written appears complete, by one rename.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tgen.checkpoint import chat_template, model_card, model_dir, safetensors_file
from tgen.checkpoint.dtypes import Array, Dtype, cast, main_dtype
from tgen.checkpoint.gguf import tokenizer
from tgen.checkpoint.gguf.architectures import check_supported
from tgen.checkpoint.gguf.writer import DTYPES, write_gguf
from tgen.checkpoint.hf import tensor_names
from tgen.checkpoint.hf.config import read_json_object, text_part
from tgen.checkpoint.model_dir import ModelBundle
from tgen.checkpoint.model_files import DESCRIPTION_FILES, NGRAMS, WEIGHTS
from tgen.config import GgufType
from tgen.storage import files
from tgen.version import __version__

MAX_SHARD_BYTES = 5_000_000_000  # transformers' default for years
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_COPY_LIMIT = 64 << 20  # bytes


def main_type(bundle: ModelBundle) -> GgufType:
    """Return the type of most of a model's weights: f32, f16 or bf16."""
    main = main_dtype(bundle.arrays.values())
    return next(stored for stored, dtype in DTYPES.items() if dtype == main)


def export_gguf(
    bundle: ModelBundle,
    out: Path,
    *,
    name: str,
    stored: GgufType,
    progress: Callable[[float], None],
) -> Counter[GgufType]:
    """Write one GGUF file with matrices of the type `stored`; return the number of matrices of
    each type.

    Raises ModelError or TokenizerError if llama.cpp does not support the model or its tokenizer.
    """
    name = tokenizer.name_to_write(bundle.tokenizer, name)
    check_supported(bundle.config)
    is_dir = bundle.path.is_dir()  # of the base, if an adapter is merged
    json_config = text_part(read_json_object(bundle.path / "config.json")) if is_dir else {}
    names = {} if is_dir else chat_template.special_tokens(bundle.path)
    ids = bundle.tokenizer.token_ids

    def token_id(name: str, default: int | None) -> int | None:
        value = json_config.get(f"{name}_id", ids.get(names.get(name, "")))
        valid = type(value) is int and 0 <= value < bundle.tokenizer.vocab_size
        return value if valid else default

    tokenizer_fields = tokenizer.to_fields(
        bundle.tokenizer,
        bundle.config.vocab_size,
        ends=sorted_ends(bundle),
        bos=token_id("bos_token", bundle.tokenizer.end_of_text),
        pad=token_id("pad_token", bundle.tokenizer.pad),
        chat_template=chat_template.chat_template_source(bundle.settings_path),
        name=name,
    )
    target = out.resolve()
    files.make_folder(target.parent)
    with files.replacing(target) as temporary:
        return write_gguf(
            temporary,
            bundle.config,
            bundle.arrays,
            stored=stored,
            tokenizer_fields=tokenizer_fields,
            name=name,
            fields=_card_fields(bundle, name),
            progress=progress,
        )


def _card_fields(bundle: ModelBundle, name: str) -> dict[str, Any]:
    """Return the fields of a GGUF file that describe a model, from its card."""
    read = model_card.read_fields(bundle.named_path)
    card = {key: text.strip("\"'") for key, text in read.items()}
    fields: dict[str, Any] = {"general.description": f"{name}, exported by tgen {__version__}"}
    fields |= {field: card[key] for key, field in model_card.GGUF_FIELDS.items() if key in card}
    if "base_model" in card:
        fields["general.base_model.count"] = 1
    return fields


def sorted_ends(bundle: ModelBundle) -> list[int]:
    """Return the end-of-text tokens, the main one first."""
    return sorted(bundle.end_ids, key=lambda i: (i != bundle.tokenizer.end_of_text, i))


def export_transformers(
    bundle: ModelBundle,
    out: Path,
    *,
    stored: GgufType,
    max_shard_bytes: int,
    progress: Callable[[float], None],
) -> None:
    """Write a directory with weights as f32, f16 or bf16, in shards of at most `max_shard_bytes`.

    A larger tensor gets its own shard. Raises ModelError for values too large for the type.
    """
    dtype = DTYPES[stored]
    arrays = tensor_names.to_hf_arrays(bundle.config, bundle.arrays)
    shards = _assign_shards(arrays, _ITEM_BYTES[dtype], max_shard_bytes)
    target = out.resolve()
    files.make_folder(target.parent)
    with files.replacing(target) as temporary:
        temporary.mkdir()
        done, total = 0, sum(array.size for array in arrays.values())
        for file, names in shards.items():
            shard = {name: cast(name, arrays[name], dtype) for name in names}
            parts = safetensors_file.serialize_in_parts(shard, uint16="BF16")
            files.write_new(temporary / file, parts)
            done += sum(arrays[name].size for name in names)
            progress(done / total)
        contents = _metadata_files(bundle, dtype)
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {
                "metadata": {"total_size": total * _ITEM_BYTES[dtype]},
                "weight_map": dict(sorted(weight_map.items())),
            }
            contents[f"{WEIGHTS}.index.json"] = (json.dumps(index, indent=2) + "\n").encode()
        description = f"{bundle.config.family}, {total / 1e6:.2f} M parameters"
        card = model_card.export_card(bundle.named_path, target, description)
        contents[model_card.FILE_NAME] = card
        for name in sorted(contents, key=lambda name: name == "config.json"):
            files.write_new(temporary / name, contents[name])


def _assign_shards(
    arrays: Mapping[str, Array], item_bytes: int, max_bytes: int
) -> dict[str, list[str]]:
    """Assign tensors, in their order, to files named as transformers names them."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        n_bytes = array.size * item_bytes
        if groups[-1] and size + n_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": names
        for i, names in enumerate(groups, 1)
    }


def _metadata_files(bundle: ModelBundle, dtype: Dtype) -> dict[str, bytes]:
    """Return every file except the weights: the model's own, with the dtype changed."""
    path = bundle.path
    if path.is_file():
        contents = model_dir.build_metadata_files(
            bundle.config, bundle.tokenizer, inherited=model_dir.inherited_settings(bundle)
        )
        json_config: dict[str, Any] = json.loads(contents["config.json"])
    else:
        json_config = dict(text_part(read_json_object(path / "config.json")))
        limits = {**dict.fromkeys(DESCRIPTION_FILES, _COPY_LIMIT), NGRAMS: None}
        contents = {
            name: files.read(path / name, limit=limit)
            for name, limit in limits.items()
            if (path / name).is_file()
        }
        if (settings := bundle.settings_path) != path:  # an adapter has its own chat template
            own = {n: settings / n for n in DESCRIPTION_FILES if (settings / n).is_file()}
            contents |= {n: files.read(file, limit=_COPY_LIMIT) for n, file in own.items()}
    contents.setdefault("tokenizer.json", bundle.tokenizer.json.encode())
    keys = [key for key in ("dtype", "torch_dtype") if key in json_config] or ["torch_dtype"]
    json_config |= dict.fromkeys(keys, dtype)
    json_config["tie_word_embeddings"] = bundle.config.tied_embeddings
    return contents | {"config.json": (json.dumps(json_config, indent=2) + "\n").encode()}
