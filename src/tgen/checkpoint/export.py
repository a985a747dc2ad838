"""A model written anew, in another form: one GGUF file, or a directory with other types or shards.

Nothing but a model is ever replaced, and what is written appears whole, by one rename.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tgen.checkpoint import model_dir, safetensors_file
from tgen.checkpoint.dtypes import Array, Dtype, cast, dtype_of
from tgen.checkpoint.gguf import header, tokenizer
from tgen.checkpoint.gguf.writer import GgufType, check, require_package, write_gguf
from tgen.checkpoint.hf import chat_template, tensor_names
from tgen.checkpoint.model_dir import WEIGHTS, ModelBundle
from tgen.checkpoint.ngram_tables import FILE as NGRAMS
from tgen.errors import ModelError, UsageError
from tgen.storage import files

TYPES: dict[str, GgufType] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "q8_0": "int8",
}
MAX_SHARD_BYTES = 5_000_000_000  # transformers' own for long
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_KEPT_LIMIT = 64 << 20
# Taken over as they are, where they are there.
_KEPT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def stored_as(bundle: ModelBundle) -> Dtype:
    """What most of a model's numbers are stored as."""
    sizes: dict[Dtype, int] = {}
    for array in bundle.arrays.values():
        sizes[dtype_of(array)] = sizes.get(dtype_of(array), 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def check_target(out: Path, source: Path, *, to_file: bool, overwrite: bool) -> None:
    """Raises UsageError unless a model may be written to `out`: nothing but a model is lost."""
    place = source.resolve()
    if out.resolve() in (place, *place.parents):
        raise UsageError(f"--out {out} is or holds the model itself", "give another place")
    if not out.exists() or (out.is_dir() and not to_file and not any(out.iterdir())):
        return
    if out.is_dir() == to_file:
        wanted = "a directory, not a file" if to_file else "a file, not a directory"
        raise UsageError(f"--out {out} is {wanted}", "give another place")
    if others := _not_of_a_model(out):
        raise UsageError(f"--out {out} holds other things: {others[0]}", "give another place")
    if not overwrite:
        raise UsageError(
            f"{out} already holds a model", "add --overwrite to replace it, or give another --out"
        )


def to_gguf(
    bundle: ModelBundle,
    out: Path,
    *,
    name: str,
    stored: GgufType,
    progress: Callable[[float], None],
) -> None:
    """Writes one GGUF file. Raises UsageError where the package gguf is missing, ModelError or
    TokenizerError where llama.cpp has no place for the model or its tokenizer."""
    require_package("writing GGUF")
    check(bundle.config)
    described = _described(bundle.path)
    end = bundle.tokenizer.end_of_text
    vocabulary = tokenizer.to_fields(
        bundle.tokenizer,
        bundle.config.vocab_size,
        ends=sorted(bundle.end_ids, key=lambda i: (i != end, i)),
        bos=_token(described.get("bos_token_id"), bundle, end),
        pad=_token(described.get("pad_token_id"), bundle, bundle.tokenizer.pad),
        chat_template=_chat_template(bundle.path),
    )
    with files.staged(out.resolve()) as place:
        write_gguf(
            place,
            bundle.config,
            bundle.arrays,
            stored=stored,
            vocabulary=vocabulary,
            name=name,
            progress=progress,
        )


def to_transformers(
    bundle: ModelBundle,
    out: Path,
    *,
    dtype: Dtype,
    max_shard_bytes: int,
    progress: Callable[[float], None],
) -> None:
    """Writes a directory with weights in `dtype`, in shards of at most so many bytes.

    A tensor that is larger has a shard of its own. Raises ModelError for numbers that are too large
    for `dtype`.
    """
    arrays = tensor_names.to_layout(bundle.config, bundle.arrays)
    shards = _shards(arrays, _ITEM_BYTES[dtype], max_shard_bytes)
    with files.staged(out.resolve()) as place:
        done, total = 0, sum(array.size for array in arrays.values())
        for file, names in shards.items():
            content = safetensors_file.serialize_weights(
                {n: cast(n, arrays[n], dtype) for n in names}
            )
            files.put_into(place, file, content)
            done += sum(arrays[name].size for name in names)
            progress(done / total)
        if len(shards) > 1:
            files.put_into(place, f"{WEIGHTS}.index.json", _index(shards, total, dtype))
        for name, text in _descriptions(bundle, dtype).items():
            files.put_into(place, name, text)


def _shards(arrays: Mapping[str, Array], item_bytes: int, most: int) -> dict[str, list[str]]:
    """Which tensors go to which file, in their order, named as transformers names them."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        n_bytes = array.size * item_bytes
        if groups[-1] and size + n_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {
        f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": names
        for i, names in enumerate(groups, 1)
    }


def _index(shards: Mapping[str, list[str]], n_numbers: int, dtype: Dtype) -> bytes:
    weight_map = {name: file for file, names in shards.items() for name in names}
    metadata = {"total_size": n_numbers * _ITEM_BYTES[dtype]}
    text = json.dumps(
        {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2
    )
    return (text + "\n").encode()


def _descriptions(bundle: ModelBundle, dtype: Dtype) -> dict[str, bytes]:
    """All files but the weights: the model's own, but for the type in its config."""
    if bundle.path.is_file():
        texts = model_dir.descriptions(bundle.config, bundle.tokenizer)
        described: dict[str, Any] = json.loads(texts["config.json"])
        template = _chat_template(bundle.path)
        if template:
            texts["chat_template.jinja"] = template.encode()
    else:
        described = _described(bundle.path)
        kept = [name for name in (*_KEPT, NGRAMS) if (bundle.path / name).is_file()]
        limits = {NGRAMS: None}
        texts = {
            name: files.read(bundle.path / name, limit=limits.get(name, _KEPT_LIMIT))
            for name in kept
        }
    spellings = [key for key in ("dtype", "torch_dtype") if key in described] or ["torch_dtype"]
    described |= dict.fromkeys(spellings, dtype)
    return texts | {"config.json": (json.dumps(described, indent=2) + "\n").encode()}


def _described(path: Path) -> dict[str, Any]:
    """config.json's content; for a GGUF file nothing, since its tokenizer says the same."""
    return {} if path.is_file() else model_dir.read_json(path / "config.json")


def _chat_template(path: Path) -> str | None:
    """The template for conversations that comes with a model, if it is one."""
    try:
        found = chat_template.read(path)[0]
    except ModelError:
        return None
    return found if isinstance(found, str) else None


def _token(value: object, bundle: ModelBundle, otherwise: int | None) -> int | None:
    known = type(value) is int and 0 <= value < bundle.tokenizer.vocab_size
    return value if known else otherwise  # type: ignore[return-value]


def _not_of_a_model(path: Path) -> list[str]:
    """What stands there beside the files of a model."""
    if path.is_dir():
        known = {*_KEPT, NGRAMS, "config.json", f"{WEIGHTS}.index.json"}
        entries = sorted(path.iterdir())
        return [
            entry.name
            for entry in entries
            if not entry.is_file() or (entry.name not in known and entry.suffix != ".safetensors")
        ]
    try:
        header.read_header(path)
    except ModelError:
        return ["it is no GGUF file"]
    return []
