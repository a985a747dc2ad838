"""Model directories: loading (GGUF files too) and saving, in the Hugging Face layout.

A directory appears complete by one rename; afterwards each file changes by one rename.
"""

import gc
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.checkpoint import chat_template, git_lfs, safetensors_file
from tgen.checkpoint.dtypes import cast, main_dtype
from tgen.checkpoint.gguf.quantized_matrix import QuantizedMatrix
from tgen.checkpoint.hf import config as hf_config
from tgen.checkpoint.hf import generation_config, tensor_names
from tgen.checkpoint.hf.families import FAMILY_LAYOUTS
from tgen.checkpoint.inherited_settings import InheritedSettings, read_inherited_settings
from tgen.checkpoint.model_files import (
    NGRAMS,
    WEIGHTS,
    adapter_files,
    files_of_a_model,
    missing_hint,
    model_files,
    shards,
    stamp_files,
)
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, ADAPTER_FILES
from tgen.checkpoint.tensor_mapping import shapes_by_name
from tgen.config import ModelConfig, SamplingConfig, StoredAs
from tgen.errors import ModelError, TgenError
from tgen.machine.memory import check_ram
from tgen.storage import files
from tgen.tokenizer import Tokenizer

_CONFIG_LIMIT, _TOKENIZER_LIMIT = 1 << 20, 64 << 20  # bytes
_HEADLESS = re.compile(r"(?<!LMHead)Model$")  # a class of transformers
_MAX_READS = 3  # attempts, if the directory is replaced during each read
_CONVERT_TOKENIZER = (
    'or convert the tokenizer: python -c "from transformers import AutoTokenizer as A; '
    'A.from_pretrained({path!r}).save_pretrained({path!r})"'
)
_NGRAM_COLUMNS = {"ngrams_2": 3, "ngrams_3": 4, "ngrams_4": 5}
_OTHER_COPY = "download the model again: it is damaged"


@dataclass(frozen=True)
class ModelBundle:
    """A loaded model: arrays by tgen's names in float32, float16 or bfloat16 (uint16 bits), or
    matrices of a quantized file as `QuantizedMatrix`."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    arrays: dict[str, NDArray[Any]]
    end_ids: frozenset[int]  # end-of-text tokens
    stamp: tuple[int, ...]  # inode, size and time of its files when they were read, see `digest`
    quantized: bool = False  # whether the file has fewer bits per weight
    warnings: tuple[str, ...] = ()  # contradictions between the files
    adapter: Path | None = None  # directory of the adapter that is merged into the arrays
    base_dtype: StoredAs | None = None  # `stored_dtype` before an adapter was merged

    @property
    def named_path(self) -> Path:
        """The path that a model is named by: that of its adapter if it has one."""
        return self.adapter or self.path

    @property
    def settings_path(self) -> Path:
        """The directory of chat template and generation config: the adapter's if it has them."""
        return settings_path(self.path, self.adapter)


def settings_path(path: Path, adapter: Path | None) -> Path:
    """Return the directory with the chat template and the generation config of a model."""
    described = adapter is not None and (adapter / "tokenizer_config.json").exists()
    return adapter if adapter is not None and described else path


def stored_dtype(bundle: ModelBundle) -> StoredAs:
    """Return the dtype of the matrices in the file, as torch stores them on CUDA."""
    if bundle.base_dtype is not None:
        return bundle.base_dtype
    if any(isinstance(a, QuantizedMatrix) and a.has_four_bits for a in bundle.arrays.values()):
        return "int4"
    if bundle.quantized:
        return "int8"
    matrices = {array.dtype for array in bundle.arrays.values() if array.ndim == 2}
    narrow: dict[Any, StoredAs] = {np.dtype("u2"): "bfloat16", np.dtype("f2"): "float16"}
    return narrow.get(matrices.pop(), "float32") if len(matrices) == 1 else "float32"


def kernels_dtype(bundle: ModelBundle) -> StoredAs:
    """Return the dtype in which the kernels store the matrices of a file."""
    dtype = stored_dtype(bundle)
    return "float32" if dtype == "float16" else dtype


def build_metadata_files(
    config: ModelConfig, tokenizer: Tokenizer, *, inherited: InheritedSettings | None = None
) -> dict[str, bytes]:
    """Return the content of every file of a model directory except the weights.

    `inherited` are the settings of the model that this one was fine-tuned from.
    """
    settings = inherited or InheritedSettings()
    if settings.contents:
        described = hf_config.from_json(json.loads(settings.contents["config.json"]))
        if described.tied_embeddings != config.tied_embeddings:  # the weights have won
            settings = settings.with_tied_embeddings(config.tied_embeddings)
        return settings.copied_files | {"tokenizer.json": tokenizer.json.encode()}
    end, pad = tokenizer.end_of_text, tokenizer.pad
    begin = tokenizer.bos_ids[0] if tokenizer.bos_ids else end
    special = {"bos_token": begin, "eos_token": end, "pad_token": pad}  # foreign ones may be None
    named = {name: tokenizer.id_to_token(i) for name, i in special.items() if i is not None}
    ids = tokenizer.token_ids
    named |= {name: text for name, text in settings.special_tokens.items() if text in ids}
    begin, pad = (ids.get(named.get(name) or "") for name in ("bos_token", "pad_token"))
    ends = settings.end_ids
    eos = ends if len(ends) > 1 else ends[0] if ends else end
    sampling = SamplingConfig()
    generation = settings.generation_config or {
        "bos_token_id": begin,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
    }
    objects = {
        "config.json": hf_config.to_json(config, begin=begin, end=eos, pad=pad),
        generation_config.FILE_NAME: generation | {"eos_token_id": eos},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "padding_side": "left",
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }
    contents = {
        name: (json.dumps(value, indent=2) + "\n").encode() for name, value in objects.items()
    }
    if settings.chat_template is not None:
        contents["chat_template.jinja"] = settings.chat_template.encode(errors="replace")
    return contents | {"tokenizer.json": tokenizer.json.encode()}


def inherited_settings(bundle: ModelBundle) -> InheritedSettings:
    """Return the settings that a model fine-tuned from this one inherits."""
    return read_inherited_settings(
        bundle.settings_path,
        config_path=bundle.path,
        end_ids=bundle.end_ids,
        end_of_text=bundle.tokenizer.end_of_text,
        dtype="float32" if bundle.quantized else main_dtype(bundle.arrays.values()),
    )


def save(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    arrays: Mapping[str, NDArray[Any]],
    *,
    ngrams: Mapping[str, NDArray[Any]] | None = None,
    inherited: InheritedSettings | None = None,
    is_new: bool = False,
) -> None:
    """Create a model directory, or replace the model in an existing one; raises ModelError for
    weights too large for the dtype that is inherited.

    If only the weights differ, only their file is replaced, unless the model `is_new`. Otherwise,
    the other files of the old model are removed, since programs would use them with the new one.
    Files that do not belong to a model stay.
    """
    contents: dict[str, files.Content] = {
        **build_metadata_files(config, tokenizer, inherited=inherited)
    }
    if ngrams:
        contents[NGRAMS] = safetensors_file.serialize(ngrams)
    elif (path / NGRAMS).exists():
        files.remove(path / NGRAMS)  # built from another text
    stored = tensor_names.to_hf_arrays(config, arrays)
    if inherited:
        stored = {name: cast(name, array, inherited.dtype) for name, array in stored.items()}
    weights = safetensors_file.serialize_in_parts(stored, uint16="BF16")
    publish_model(path, contents, WEIGHTS, weights, main="config.json", is_new=is_new)


def publish_model(
    path: Path,
    contents: dict[str, files.Content],
    weights_name: str,
    weights: files.Content,
    *,
    main: str,
    is_new: bool,
) -> None:
    """Write the files of a model or an adapter; a directory without the `main` file is neither."""
    if not path.exists():
        files.publish_folder(path, contents | {weights_name: weights})
    elif not is_new and all(
        (path / n).exists() and files.read(path / n) == c for n, c in contents.items()
    ):
        files.publish(path / weights_name, weights)
    else:  # remove the main file first, and write it last
        for name in ("config.json", ADAPTER_CONFIG):
            files.remove(path / name)
        contents[weights_name] = weights
        for name in files_of_a_model(path):
            if name not in contents:
                files.remove(path / name)
        for name in sorted(contents, key=lambda name: name == main):
            files.publish(path / name, contents[name])


def load(path: Path, *, with_weights: bool = True, tied_embeddings: bool = False) -> ModelBundle:
    """Load a model directory or a GGUF file; raises ModelError or TokenizerError.

    The arrays of a model whose weights were checked before may be left out; `tied_embeddings` says
    whether they have no LM head of their own.
    """
    # `save` removes config.json first and writes it last: if it, or a GGUF file, changed during the
    # read, the model is read again, so the result never mixes two models.
    for _ in range(_MAX_READS):
        before = _config_stamp(path)
        try:
            bundle = _load(path, with_weights, tied_embeddings)
        except (TgenError, OSError):
            if _config_stamp(path) == before:
                raise
        else:
            if _config_stamp(path) == before:
                return bundle
    raise ModelError(f"{str(path)!r} keeps changing while it is read", "try again later")


@contextmanager
def _without_gc() -> Iterator[None]:
    """Pause garbage collection: vocabularies are 100,000 objects, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_gc()
def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model without the weights; raises ModelError or TokenizerError."""
    if not path.is_file():
        return _load_metadata(path)[1]
    from tgen.checkpoint.gguf import reader

    return reader.load_tokenizer(path)


def _config_stamp(path: Path) -> tuple[int, ...]:
    try:
        return stamp_files(model_files(path) if path.is_file() else [path / "config.json"])
    except OSError:
        return ()


@_without_gc()
def _load(path: Path, with_weights: bool, tied_embeddings: bool) -> ModelBundle:
    warnings: list[str] = []
    if path.is_file():
        stamp = stamp_files(model_files(path))
        from tgen.checkpoint.gguf import reader

        config, tokenizer, arrays, ends, quantized = reader.load(path, with_weights=with_weights)
    else:
        quantized = False
        config, tokenizer, ends, warnings = _load_metadata(path)
        if any((path / name).exists() for name in ADAPTER_FILES):
            warnings.append("the adapter is ignored: merge it into the model to use it")
        stamp, tied = stamp_files(model_files(path)), config.tied_embeddings
        arrays = {}
        if with_weights:
            config, arrays = _read_weights(path, config)
        else:
            config = replace(config, tied_embeddings=tied_embeddings)
        if tied != config.tied_embeddings:
            what = "have a head of their own" if tied else "have no head, so the embedding is used"
            warnings.append(f"the weights {what}, unlike tie_word_embeddings in config.json")
        if chat_template.bos_flag(path) not in (None, bool(tokenizer.bos_ids)):
            what = "adds a beginning-of-text token" if tokenizer.bos_ids else "adds none"
            warnings.append(f"tokenizer.json {what}, unlike add_bos_token in tokenizer_config.json")
    scaling, n = config.rope_scaling, config.context_length
    if (
        scaling
        and scaling.kind == "longrope"
        and n < scaling.original_context_length * scaling.factor
    ):
        warnings.append(
            f"the context is limited to {n:,} tokens: beyond it, longrope changes earlier keys"
        )
    if not ends and tokenizer.end_of_text is not None:
        ends = [tokenizer.end_of_text]
    return ModelBundle(
        path, config, tokenizer, arrays, frozenset(ends), stamp, quantized, tuple(warnings)
    )


def _load_metadata(path: Path) -> tuple[ModelConfig, Tokenizer, list[int], list[str]]:
    """Return the config, the tokenizer, the end tokens and warnings."""
    if not path.is_dir():
        reason = "is not a file or directory" if path.exists() else "does not exist"
        raise ModelError(
            f"model {str(path)!r} {reason}", "name the directory that `tgen train` wrote"
        )
    if not (path / "config.json").exists():
        raise ModelError(f"{str(path)!r} is not a model: it has no config.json", missing_hint(path))
    whole_config = hf_config.read_json_object(path / "config.json", limit=_CONFIG_LIMIT)
    json_config = hf_config.text_part(whole_config)
    config = hf_config.from_json(json_config)
    end_ids: Any = generation_config.read(path).end_ids or json_config.get("eos_token_id")
    listed = [i for i in (end_ids if isinstance(end_ids, list) else [end_ids]) if i is not None]
    ends = [i for i in listed if type(i) is int and 0 <= i < config.vocab_size]
    tokenizer = read_tokenizer(path, config, json_config.get("model_type"), ends)
    warnings = []
    if json_config is not whole_config:
        warnings.append("this is a model with images, of which only the text part is used")
    if unusable := [i for i in listed if i not in ends]:
        shown = ", ".join(map(repr, unusable))[:100]
        warnings.append(f"eos_token_id {shown} is ignored: not the id of a token")
    return config, tokenizer, ends, warnings


def read_tokenizer(
    path: Path, config: ModelConfig, model_type: object, ends: list[int]
) -> Tokenizer:
    """Read the tokenizer of a directory, of any form; `model_type` is that of config.json.

    Raises ModelError or TokenizerError.
    """
    if (path / "tokenizer.json").exists():
        content = files.read(path / "tokenizer.json", limit=_TOKENIZER_LIMIT)
        git_lfs.reject_lfs_pointer(path / "tokenizer.json", content)
        text = content.decode("utf-8", errors="replace")
        return Tokenizer(text, end_ids=ends, n_rows=config.vocab_size)
    from tgen.checkpoint.hf.older_tokenizers import has_older_tokenizer, read_older_tokenizer

    if has_older_tokenizer(path):

        def read() -> dict[str, Any]:
            return read_older_tokenizer(path, model_type)

        return Tokenizer(read(), parse_again=read, end_ids=ends, n_rows=config.vocab_size)
    hint = f"download it too, {_CONVERT_TOKENIZER.format(path=str(path))}"
    if (path / "training" / "run.json").exists():
        hint = missing_hint(path)
    elif path.name.startswith("checkpoint-") and (path.parent / "tokenizer.json").exists():
        hint = f"copy it from {path.parent}"
    raise ModelError(f"{str(path)!r} has no tokenizer.json", hint)


def _read_weights(path: Path, config: ModelConfig) -> tuple[ModelConfig, dict[str, NDArray[Any]]]:
    """Return the config and all arrays by tgen's names; every shape is checked before the first
    read. As in transformers 5, a head in the file wins over a config that ties it."""
    config, headers, names = _find_tensors(path, config)
    head = tensor_names.head_name(config)
    entries = [entry for header in headers.values() for entry in header.values()]
    check_ram(sum(e.end - e.start for e in entries), f"loading {str(path)!r}")
    stored: dict[str, NDArray[Any]] = {}
    for file, header in headers.items():
        stored |= safetensors_file.read_arrays(file, header, rename=names.__getitem__)
    safetensors_file.check_finite(path, stored)
    embedding = tensor_names.tensor_mappings(config)[0].theirs[0]
    if config.tied_embeddings and head in stored:
        if np.array_equal(stored[head], stored[embedding]):
            del stored[head]
        else:
            config = replace(config, tied_embeddings=False)
    for name, array in stored.items():
        if array.dtype == np.float64:
            stored[name] = array.astype(np.float32)
    return config, tensor_names.from_hf_arrays(config, stored)


def _find_tensors(
    path: Path, config: ModelConfig
) -> tuple[ModelConfig, dict[Path, dict[str, safetensors_file.TensorEntry]], dict[str, str]]:
    """Return the config, the model's tensors by file, and their names in transformers; every shape
    is checked."""
    headers = {path / shard: read_header(path / shard) for shard in shards(path)}
    stored_shapes = {name: e.shape for header in headers.values() for name, e in header.items()}
    plain = tensor_names.plain_names(stored_shapes)
    in_family, lacks_prefix = tensor_names.names_in_file(config, plain.values())
    names = {name: in_family[usual] for name, usual in plain.items()}
    if len({*names.values()}) < len(names):
        twice = Counter(names.values()).most_common(1)[0][0]
        raise ModelError(f"{str(path)!r} has several tensors {twice[:200]}", _OTHER_COPY)
    shapes = {name: stored_shapes[stored] for stored, name in names.items()}
    head = tensor_names.head_name(config)
    if not config.tied_embeddings and head not in shapes:
        if lacks_prefix or _is_headless(path):
            raise ModelError(
                f"{str(path)!r} has no LM head: only the model below it was saved",
                f"save the whole {FAMILY_LAYOUTS[config.family].model_class}",
            )
        config = replace(config, tied_embeddings=True)
    tensor_names.check_shapes(config, shapes)
    used = {head, *shapes_by_name(tensor_names.tensor_mappings(config))}
    headers = {
        file: {name: entry for name, entry in header.items() if names.get(name) in used}
        for file, header in headers.items()
    }
    for file, header in headers.items():
        safetensors_file.check_float_dtypes(file, header)
    return config, headers, names


def load_ngrams(folder: Path, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Return the tables that `corpus.ngram_tables` built; empty if the file does not exist.

    Raises ModelError if they are damaged or belong to a model with another vocabulary.
    """
    path = folder / NGRAMS
    if not path.exists():
        return {}
    hint = f"remove {path}; the model works without it"
    header = safetensors_file.read_header(path, hint=hint)
    for name, entry in header.items():
        if entry.dtype not in ("U16", "U32") or entry.shape[1:] != (_NGRAM_COLUMNS.get(name),):
            raise ModelError(f"{path}: {name!r} {entry.shape} is not an n-gram table", hint)
    tables = safetensors_file.read_arrays(path, header)
    for table in tables.values():
        if table[:, :-1].max(initial=0) >= vocab_size or table[:, -1].max(initial=0) > 100:
            raise ModelError(f"{path} does not fit a vocabulary of {vocab_size} tokens", hint)
    return tables


def describe(path: Path) -> tuple[ModelConfig, Counter[str]]:
    """Return the config of a model and the number of its parameters by type, without its weights.

    Raises ModelError.
    """
    if path.is_file():
        from tgen.checkpoint.gguf import reader

        return reader.describe(path)
    config = hf_config.from_json(
        hf_config.read_json_object(path / "config.json", limit=_CONFIG_LIMIT)
    )
    config, headers, names = _find_tensors(path, config)
    counts: Counter[str] = Counter()
    for header in headers.values():
        for name, entry in header.items():
            if not config.tied_embeddings or names[name] != tensor_names.head_name(config):
                counts[safetensors_file.FLOATS[entry.dtype]] += math.prod(entry.shape)
    return config, counts


def _is_headless(path: Path) -> bool:
    """Whether config.json names a class without an LM head, such as LlamaModel."""
    classes = hf_config.read_json_object(path / "config.json").get("architectures")
    return isinstance(classes, list) and any(_HEADLESS.search(str(name)) for name in classes)


def digest(bundle: ModelBundle) -> str:
    """Return the SHA-256 of the model's config and weights, and of the adapter's; raises ModelError
    if they changed."""
    sha256, of_model = hashlib.sha256(), model_files(bundle.path)
    if bundle.adapter is not None:
        of_model += adapter_files(bundle.adapter)
    for file in of_model:
        sha256.update(files.sha256(file))
    if stamp_files(of_model) != bundle.stamp:
        raise changed_error(bundle)
    return sha256.hexdigest()


def changed_error(bundle: ModelBundle) -> ModelError:
    """Return the error of a model whose files have changed."""
    message = f"{str(bundle.path)!r} has changed since it was read"
    return ModelError(message, "start again to use the new model")


def read_header(file: Path) -> dict[str, safetensors_file.TensorEntry]:
    """Return the tensors of a file with weights, of safetensors or of torch; raises ModelError."""
    if file.suffix == ".safetensors":
        return safetensors_file.read_header(file)
    from tgen.checkpoint import torch_file

    return torch_file.read_header(file)
