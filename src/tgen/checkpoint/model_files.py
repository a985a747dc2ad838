"""The files of model directories: which they are, what is missing, whether they have changed."""

import os
import re
import shlex
from pathlib import Path

from tgen.checkpoint import model_card
from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.hf.config import read_json_object
from tgen.checkpoint.stored_models import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    ADAPTER_TORCH_WEIGHTS,
    ADAPTER_WEIGHTS,
    gguf_parts,
    is_adapter,
)
from tgen.errors import ModelError, TgenError
from tgen.storage import files

WEIGHTS = "model.safetensors"
NEEDED_FILES = ("config.json", "tokenizer.json", WEIGHTS)  # of a model that tgen trained
_INDEX = f"{WEIGHTS}.index.json"
_TORCH_WEIGHTS = "pytorch_model.bin"
NGRAMS = "ngrams.safetensors"  # of the training text, from which drafts are proposed
DESCRIPTION_FILES = (  # files of a model besides config.json and the weights
    generation_config.FILE_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_KNOWN_FILES = {*DESCRIPTION_FILES, *ADAPTER_FILES, NGRAMS, WEIGHTS, _INDEX, "config.json"}
_SHARD_OF_MODEL = re.compile(r"model-\d+-of-\d+\.safetensors")
_SHARD = re.compile(r"^[A-Za-z0-9][\w.-]{0,200}\.(safetensors|bin)$")


def files_of_a_model(path: Path) -> list[str]:
    """Return the names of the files in a directory that belong to a model; none if its
    configuration is that of another program."""
    mains = [path / name for name in ("config.json", ADAPTER_CONFIG)]
    if any(not _names_a_type(main) for main in mains if os.path.lexists(main)):
        return []
    return [
        file.name
        for file in sorted(path.iterdir())
        if (file.name in _KNOWN_FILES or _SHARD_OF_MODEL.fullmatch(file.name)) and not file.is_dir()
    ] + [model_card.FILE_NAME] * model_card.is_unedited(path)


def _names_a_type(config: Path) -> bool:
    """Whether a file is the configuration of a model or an adapter. Other programs have files of
    these names, too."""
    try:
        values = read_json_object(config)
    except (TgenError, OSError):
        return False
    key = "peft_type" if config.name == ADAPTER_CONFIG else "model_type"
    return isinstance(values.get(key), str)


def is_whole(path: Path) -> bool:
    """Return whether a directory has a whole model or adapter: its configuration, which names a
    type, and weights."""
    names = files_of_a_model(path) if path.is_dir() else []
    if "config.json" not in names:
        return set(ADAPTER_FILES) <= set(names)
    return any(name.startswith("model") and name.endswith(".safetensors") for name in names)


def files_to_load(path: Path) -> list[str]:
    """Return the names of the files of a model or an adapter that tgen or transformers loads;
    none in other directories."""
    names = [name for name in files_of_a_model(path) if name != model_card.FILE_NAME]
    weights = is_whole(path) or any(path.glob("pytorch_model*.bin")) or any(path.glob("*.gguf"))
    return names if weights and {"config.json", ADAPTER_CONFIG} & {*names} else []


def belongs_to_a_model(path: Path) -> bool:
    """Return whether a file written to `path` would replace or join the files of a model."""
    for file in (path, path.resolve()):  # cached models consist of links
        of_a_model = file.name in _KNOWN_FILES or file.suffix == ".safetensors"
        has_model = (file.parent / "config.json").exists() or is_adapter(file.parent)
        if of_a_model and has_model:
            return True
        if file.parent.name == "training" and (file.parent / "run.json").exists():
            return True
    if not path.is_file():
        return False
    try:
        with files.open_regular(path) as content:
            return content.read(4) == b"GGUF"
    except TgenError:  # not readable
        return False


def model_files(path: Path) -> list[Path]:
    """Return the files that determine what the model computes: config and weights."""
    if path.is_file():
        return [part for part in gguf_parts(path) if part.exists()]
    return [path / name for name in ("config.json", *shards(path))]


def adapter_files(path: Path) -> list[Path]:
    """Return the configuration and the weights of an adapter."""
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_TORCH_WEIGHTS)
    existing = [path / name for name in names if (path / name).exists()]
    return existing[:2]


def stamp_files(paths: list[Path]) -> tuple[int, ...]:
    """Numbers that change when one of the files is replaced or written to."""
    return tuple(
        number
        for status in map(os.stat, paths)
        for number in (status.st_ino, status.st_size, status.st_mtime_ns)
    )


def shards(path: Path) -> list[str]:
    """Return the names of the files with the weights; raises ModelError if some are missing."""
    names = (WEIGHTS, _INDEX, _TORCH_WEIGHTS, f"{_TORCH_WEIGHTS}.index.json")
    name = next((name for name in names if (path / name).exists()), None)
    if name is None:
        raise ModelError(f"{str(path)!r} has no {WEIGHTS}", missing_hint(path))
    if name in (WEIGHTS, _TORCH_WEIGHTS):
        return [name]
    index = path / name
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and _SHARD.match(name) for name in weight_map.values()
    ):
        raise ModelError(
            f"{index} names files outside the directory or is damaged", "download it again"
        )
    shards = sorted(set(weight_map.values()))
    if missing := [name for name in shards if not (path / name).exists()]:
        raise ModelError(
            f"{str(path)!r} lacks {', '.join(missing[:5])}", "download the missing files"
        )
    return shards


def missing_hint(path: Path) -> str:
    """Return what to do about a directory that lacks a file of a model."""
    if any((path / name).exists() for name in ADAPTER_FILES):
        if (path / "config.json").exists():
            return "this is an adapter: remove config.json, or name its base with --model BASE"
        return "this is an adapter: name its base with --model, or remove --adapter"
    if any(path.glob("*-of-*.safetensors")):
        return f"download {_INDEX} too: the weights are in shards"
    if (path / "training" / "run.json").exists():
        return (
            f"run `tgen train --resume --out {shlex.quote(str(path))}`: the run writes its weights "
            "again, or the first ones; if training failed, start again with --overwrite and lower "
            "learning rates"
        )
    if (path / "training" / "LOCK").exists():
        return (
            "wait if its training is just starting; if it was stopped before it began, start it "
            "again with `tgen train`"
        )
    steps = {name[11:]: path / name for name in os.listdir(path) if name[:11] == "checkpoint-"}
    if numbers := [step for step in steps if step.isdigit() and is_whole(steps[step])]:
        return f"name a checkpoint in it: {steps[max(numbers, key=int)]}"
    if others := sorted({*path.glob("*.bin"), *path.glob("*.pt*")}):
        if not (path / "config.json").exists():
            return "download config.json too"
        return f"if {others[0].name} has the weights, rename it to {_TORCH_WEIGHTS}"
    return "name the directory that `tgen train` wrote"
