"""A model directory: everything needed to run the model, in files that the whole field reads.

A directory appears complete by one rename; afterwards its files change by one rename each.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import consistent_read, safetensors_file
from tgen.checkpoint.gguf import reader
from tgen.checkpoint.hf import config as config_json
from tgen.checkpoint.hf import generation_config, tensor_names
from tgen.checkpoint.ngram_tables import FILE as NGRAMS
from tgen.config import ModelConfig, SamplingConfig
from tgen.errors import ModelError, TgenError
from tgen.storage import files
from tgen.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
_HEAD = "lm_head.weight"
_CONFIG_LIMIT, _TOKENIZER_LIMIT = 1 << 20, 64 << 20
_SHARD = re.compile(r"^[A-Za-z0-9][\w.-]{0,200}\.safetensors$")


@dataclass(frozen=True)
class ModelBundle:
    """A model as it was read: arrays by our names, float32, float16 or bfloat16 as uint16 bits."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    arrays: dict[str, NDArray[Any]]
    end_ids: frozenset[int]  # tokens that end a text
    stamp: tuple[int, ...]  # of its files as they were read, see `digest`


def descriptions(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """All files of a directory but the weights."""
    end, pad = tokenizer.end_of_text, tokenizer.pad
    begin = tokenizer.start[0] if tokenizer.start else end
    # A tokenizer from elsewhere may lack some.
    named = {"bos_token": begin, "eos_token": end, "pad_token": pad}
    sampling = SamplingConfig()
    texts = {
        "config.json": config_json.to_json(config, begin=begin, end=end, pad=pad),
        "generation_config.json": {
            "bos_token_id": begin,
            "eos_token_id": end,
            "pad_token_id": pad,
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: tokenizer.id_to_token(i) for name, i in named.items() if i is not None},
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }
    contents = {
        name: (json.dumps(value, indent=2) + "\n").encode() for name, value in texts.items()
    }
    return contents | {"tokenizer.json": tokenizer.json.encode()}


def weights(config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The content of model.safetensors."""
    return safetensors_file.serialize(tensor_names.to_layout(config, arrays))


def save(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    arrays: Mapping[str, NDArray[Any]],
    *,
    ngrams: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Makes the directory, or puts new weights into the one that is there.

    A model of another kind that stands there is replaced only now that there is a new one.
    """
    described = descriptions(config, tokenizer)
    if ngrams:
        described[NGRAMS] = safetensors_file.serialize(ngrams)
    elif (path / NGRAMS).exists():
        files.remove(path / NGRAMS)  # of another text
    content = weights(config, arrays)
    if not path.exists():
        files.publish_folder(path, described | {WEIGHTS: content})
    elif all((path / n).exists() and files.read(path / n) == c for n, c in described.items()):
        files.publish(path / WEIGHTS, content)
    else:  # it counts as a model while config.json is there: taken away first, put back last
        files.remove(path / "config.json")
        contents = described | {WEIGHTS: content}
        for name in sorted(contents, key=lambda name: name == "config.json"):
            files.publish(path / name, contents[name])


def load(path: Path) -> ModelBundle:
    """Reads a model directory, or a GGUF file; raises ModelError or TokenizerError with the reason
    if it cannot.

    One that is replaced meanwhile is read once more: nothing is of two models.
    """
    return consistent_read.read(path, _load, watched="config.json")


def _load(path: Path) -> ModelBundle:
    if path.is_file():
        stamp = _stamp(path)
        config, tokenizer, arrays, ends = reader.load(path)
        return _bundle(path, config, tokenizer, arrays, ends, stamp)
    if not path.is_dir():
        what = "is no directory and no file" if path.exists() else "does not exist"
        raise ModelError(
            f"model {str(path)!r} {what}", "give the directory that `tgen train` wrote"
        )
    if not (path / "config.json").exists():
        raise ModelError(
            f"{str(path)!r} holds no model: it has no config.json", _missing_hint(path)
        )
    described = _json(path / "config.json", _CONFIG_LIMIT)
    config = config_json.from_json(described)
    if not (path / "tokenizer.json").exists():
        raise ModelError(
            f"{str(path)!r} has no tokenizer.json",
            "fetch it too; transformers writes one from older files: save_pretrained",
        )
    tokenizer_text = files.read(path / "tokenizer.json", limit=_TOKENIZER_LIMIT)
    safetensors_file.refuse_pointer(path / "tokenizer.json", tokenizer_text)
    ends = _end_ids(path, described, config.vocab_size)
    tokenizer = Tokenizer(tokenizer_text.decode("utf-8", errors="replace"), ends=ends)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}",
            "tokenizer.json is of another model",
        )
    stamp, arrays = _stamp(path), _read_weights(path, config)
    return _bundle(path, config, tokenizer, arrays, ends, stamp)


def _read_weights(path: Path, config: ModelConfig) -> dict[str, NDArray[Any]]:
    """All arrays by our names; that they are the model's is known before the first is read."""
    headers = {path / shard: safetensors_file.read_header(path / shard) for shard in _shards(path)}
    plain = tensor_names.plain_name
    tensor_names.check(config, {plain(n): e.shape for h in headers.values() for n, e in h.items()})
    used = {name for row in tensor_names.tensor_mappings(config) for name in row.theirs} | {_HEAD}
    headers = {
        file: {n: entry for n, entry in header.items() if plain(n) in used}
        for file, header in headers.items()
    }
    for file, header in headers.items():
        safetensors_file.check_types(file, header)
    stored: dict[str, NDArray[Any]] = {}
    for file, header in headers.items():
        stored |= safetensors_file.read(file, header, rename=plain)
    safetensors_file.check_finite(path, stored)
    embedding = tensor_names.tensor_mappings(config)[0].theirs[0]
    if (
        config.tied_embeddings
        and _HEAD in stored
        and not np.array_equal(stored[_HEAD], stored[embedding])
    ):
        raise ModelError(
            f"{str(path)!r}: {_HEAD} is not {embedding}, and config.json says that they are tied",
            "set tie_word_embeddings to false there if the head is to count",
        )
    plain_types = {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in stored.items()
    }
    return tensor_names.from_layout(config, plain_types)


def reload(bundle: ModelBundle) -> ModelBundle:
    """The model once more; raises ModelError if it is no longer what was read."""
    again = load(bundle.path)
    if again.stamp != bundle.stamp:
        raise _changed(bundle)
    return again


def digest(bundle: ModelBundle) -> str:
    """SHA-256 of what the model computes with: its config and its weights.

    Raises ModelError if they are no longer what was read.
    """
    found = hashlib.sha256()
    for file in _computing(bundle.path):
        found.update(files.sha256(file))
    if _stamp(bundle.path) != bundle.stamp:
        raise _changed(bundle)
    return found.hexdigest()


def _changed(bundle: ModelBundle) -> ModelError:
    message = f"{str(bundle.path)!r} has changed since it was read"
    return ModelError(message, "begin again with the new one")


def _bundle(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    arrays: dict[str, NDArray[Any]],
    ends: list[int],
    stamp: tuple[int, ...],
) -> ModelBundle:
    if not ends and tokenizer.end_of_text is not None:
        ends = [tokenizer.end_of_text]
    return ModelBundle(path, config, tokenizer, arrays, frozenset(ends), stamp)


def _computing(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [path / name for name in ("config.json", *_shards(path))]


def _stamp(path: Path) -> tuple[int, ...]:
    return consistent_read.stamp(_computing(path))


def _end_ids(path: Path, described: Mapping[str, Any], vocab_size: int) -> list[int]:
    advised = generation_config.read(path).end_ids
    end: Any = described.get("eos_token_id") if advised is None else advised
    listed = end if isinstance(end, list) else [end]
    return [i for i in listed if type(i) is int and 0 <= i < vocab_size]


def _shards(path: Path) -> list[str]:
    if (path / WEIGHTS).exists():
        return [WEIGHTS]
    index = path / f"{WEIGHTS}.index.json"
    if not index.exists():
        raise ModelError(f"{str(path)!r} holds no {WEIGHTS}", _missing_hint(path))
    names = _json(index, _TOKENIZER_LIMIT).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(n, str) and _SHARD.match(n) for n in names.values()
    ):
        raise ModelError(
            f"{index} names files outside the directory or is damaged", "fetch it again"
        )
    missing = sorted({name for name in names.values() if not (path / name).exists()})
    if missing:
        raise ModelError(f"{str(path)!r} lacks {', '.join(missing[:5])}", "fetch the missing files")
    return sorted(set(names.values()))


def _missing_hint(path: Path) -> str:
    if any(path.glob("*-of-*.safetensors")):
        return f"its weights are in shards: fetch {WEIGHTS}.index.json too"
    if (path / "training" / "run.json").exists():
        return (
            f"no weights were saved yet: `tgen train --resume --out {path}` goes on; if it failed, "
            "begin anew with --overwrite and lower rates"
        )
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        return "its weights are pickle files, which can run code: convert them to safetensors"
    return "give the directory that `tgen train` wrote"


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of a directory's small files; raises ModelError if there is none."""
    return _json(path, _TOKENIZER_LIMIT)


def _json(path: Path, limit: int) -> dict[str, Any]:
    try:
        content = files.read(path, limit=limit)
        safetensors_file.refuse_pointer(path, content)
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON", "the file is damaged") from None
    except TgenError as error:
        raise ModelError(error.message, error.hint) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", "the file is damaged")
    return value
