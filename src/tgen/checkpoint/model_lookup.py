"""Finding the model that a name refers to.

Searched in this order: the name as a path; ./models; the user's data directory; the model shipped
with tgen; the transformers cache; the models of LM Studio, llama.cpp and Ollama. Nothing is ever
downloaded. A name may end with the type of a GGUF file, as in owner/model:Q8_0.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tgen.checkpoint.stored_models import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    downloaded_models,
    entries,
    files_in,
    is_model_directory,
    join_names,
    models_in,
    select,
)
from tgen.errors import ModelError, TgenError
from tgen.storage import files

LOCAL, DATA, SHIPPED = "./models", "the data directory", "the model shipped with tgen"
CACHE = "the transformers cache"
PATH = "a path"
CHECKPOINT = "its newest checkpoint"  # of a directory of transformers' Trainer
WEIGHTS_DIRECTORY = "the directory of its weights"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_WEIGHTS = re.compile(
    r"((pytorch_)?model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
_NAME = re.compile(r"\w[\w.-]*")  # an owner, a model, or the type of a GGUF file


class ModelLocation(NamedTuple):
    """The path of a model, and where it was found."""

    path: Path
    found_by: str


class UnknownModelError(ModelError):
    """A name that is neither a path nor the name of a model."""


def find_model(name: str | None, *, models: Path = Path("models")) -> ModelLocation:
    """Find a model by name; None gives the newest model in `models`, or the shipped one.

    The directory of a Trainer means its newest checkpoint; a file of weights, its directory.

    Raises UnknownModelError with the known names if the model does not exist, ModelError if the
    name has several meanings.
    """
    if name is None:
        return _newest(models)
    location = _find(name, models)
    if checkpoint := newest_checkpoint(location.path):
        return ModelLocation(checkpoint, CHECKPOINT)
    if _is_of_directory(location.path):
        return ModelLocation(location.path.parent, WEIGHTS_DIRECTORY)
    return location


def newest_checkpoint(path: Path) -> Path | None:
    """Return checkpoint-N with the highest N in a directory that has no model itself; None without
    one that has weights."""
    if os.path.isfile(path) or any(
        map(os.path.exists, (path / "config.json", path / ADAPTER_CONFIG))
    ):
        return None
    steps = {
        int(match[1]): match[0] for match in map(_CHECKPOINT.fullmatch, entries(path)) if match
    }
    for step in sorted(steps, reverse=True):
        folder = path / steps[step]
        if is_model_directory(folder) and any(map(_WEIGHTS.fullmatch, entries(folder))):
            return folder
    return None


def weights_time(folder: Path) -> float:
    """Return when a model's weights were last written, in seconds since 1970; 0 if it has none.

    Files in directories below, such as those of training states, do not count.
    """
    times = [0.0]
    patterns = ("model*.safetensors", "pytorch_model*.bin", ADAPTER_WEIGHTS)
    for weights in (path for pattern in patterns for path in folder.glob(pattern)):
        with suppress(OSError):
            times.append(weights.stat().st_mtime)
    return max(times)


def _is_of_directory(path: Path) -> bool:
    """Whether a file belongs to the weights that the model in its directory has."""
    if not _WEIGHTS.fullmatch(path.name) or not os.path.isfile(path):
        return False
    beside = entries(path.parent)
    other = path.name.startswith("pytorch_") and any(n.startswith("model") for n in beside)
    return not other and is_model_directory(path.parent)


def _find(name: str, models: Path) -> ModelLocation:
    as_path = ModelLocation(Path(name), PATH)
    exists = bool(name.strip()) and os.path.exists(name)
    if exists and (as_path.path.is_file() or is_model_directory(as_path.path)):
        return as_path
    base = _without_type(name)
    inside = files_in(Path(base), base) if base.strip() else {}
    if chosen := select(inside, name):
        return ModelLocation(inside[chosen], PATH)
    if _is_plain(base):
        for folder, found_by in ((models, LOCAL), (data_folder(), DATA)):
            if path := _find_in(folder, name):
                return ModelLocation(path, found_by)
        if name == shipped_model().name:
            return ModelLocation(shipped_model(), SHIPPED)
        downloaded = _downloaded_models()
        if chosen := select({full: place.path for full, place in downloaded.items()}, name):
            return downloaded[chosen]
    if exists:
        return as_path
    places = (models / base, data_folder() / base) if _is_plain(base) else ()
    if name != base and any(map(is_model_directory, (Path(base), *places))):
        raise ModelError(f"model {base!r} is not a folder of GGUF files", f"use the name {base}")
    raise _unknown(name, models)


def _without_type(name: str) -> str:
    """Return owner/model of owner/model:type, and other names as they are."""
    base, colon, kind = name.rpartition(":")
    return base if colon and base.strip() and _NAME.fullmatch(kind) else name


def _find_in(folder: Path, name: str) -> Path | None:
    """Return the model of a folder of models that a name, which cannot leave it, refers to."""
    base = _without_type(name)
    path = folder / base
    if name.startswith("."):
        return None
    inside = {} if is_model_directory(path) else files_in(path, base)
    if not inside and name == base and os.path.exists(path):
        return path
    found = models_in(folder) | inside
    chosen = select(found, name)
    return found[chosen] if chosen else None


def list_models(models: Path = Path("models")) -> dict[str, ModelLocation]:
    """Return all models that can be found without a path by name, in the order of the search.

    If several models have the same name, only the first is included, which the name refers to.
    """
    found: dict[str, ModelLocation] = {}
    for folder, found_by in ((models, LOCAL), (data_folder(), DATA)):
        paths = models_in(folder) | {name: folder / name for name in _models_in(folder)}
        for name in sorted(paths):
            found.setdefault(name, ModelLocation(paths[name], found_by))
    found.setdefault(shipped_model().name, ModelLocation(shipped_model(), SHIPPED))
    return found | {name: at for name, at in _downloaded_models().items() if name not in found}


def shipped_model() -> Path:
    """Return the model shipped with tgen: inside the installed package, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "models" / "shakespeare"
    return inside if inside.exists() else package.parent.parent / "models" / "shakespeare"


def data_folder() -> Path:
    """Return the platform's per-user directory for tgen's models."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        xdg = Path(os.environ.get("XDG_DATA_HOME", ""))  # XDG requires ignoring a relative path
        base = xdg if xdg.is_absolute() else home / ".local" / "share"
    return base / "tgen" / "models"


def cache_folders() -> list[Path]:
    """Return the directories in which transformers caches downloads."""
    hub, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = [hub or "", f"{home}/hub" if home else "", f"{caches}/huggingface/hub"]
    return list(dict.fromkeys(Path(os.path.expanduser(folder)) for folder in folders if folder))


def _is_plain(name: str) -> bool:
    """Whether a name cannot lead out of the directory that it is searched in."""
    parts = re.split(r"[/\\]", name)
    return not any(part.strip(". ") == "" or ":" in part or "\0" in part for part in parts)


def _newest(models: Path) -> ModelLocation:
    shipped = shipped_model()
    _require_readable(models)
    paths = [models / name for name in _models_in(models)]
    trained = [path for path in paths if path.resolve() != shipped]
    newest = max(trained, key=weights_time, default=None)
    latest = 0.0 if newest is None else weights_time(newest)
    for folder in (models / name for name in entries(models) if not name.startswith(".")):
        # a model's files are replaced by new ones, which changes the time of its directory
        if os.path.isdir(folder) and folder.stat().st_mtime > latest:
            _require_readable(folder)
    if newest is None:
        return ModelLocation(shipped, SHIPPED)
    return ModelLocation(newest, f"the newest in {LOCAL}")


def _require_readable(folder: Path) -> None:
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise ModelError(
            f"cannot read {str(folder)!r}: permission denied",
            "check its permissions, or choose a model with --model",
        )


def _models_in(folder: Path) -> list[str]:
    """Return the names of a folder's models, without hidden ones, which may be half written."""
    names = [name for name in entries(folder) if not name.startswith(".")]
    return [name for name in names if is_model_directory(folder / name)]


def _downloaded_models() -> dict[str, ModelLocation]:
    """Return the models that transformers and other programs have downloaded, by name."""
    found = {name: ModelLocation(path, CACHE) for name, path in _cached_models().items()}
    for program, models in downloaded_models():
        for name, path in models.items():
            found.setdefault(name, ModelLocation(path, program))
    return found


def _cached_models() -> dict[str, Path]:
    """Return the snapshots of all models in the caches by name; the first cache wins."""
    models: dict[str, Path] = {}
    for folder in cache_folders():
        found: dict[str, Path] = {}
        for entry in entries(folder):
            kind, *parts = entry.split("--")
            name = "/".join(parts)
            if kind == "models" and len(parts) in (1, 2) and all(map(_NAME.fullmatch, parts)):
                found |= next(_snapshots(folder / entry, name), {})
        models = found | models
    return models


def _snapshots(folder: Path, name: str) -> Iterator[dict[str, Path]]:
    """Yield the models of each snapshot that has some: the main branch's first, then the newest."""
    try:
        main = files.read(folder / "refs" / "main", limit=100).decode("ascii", "replace").strip()
    except TgenError:
        main = ""
    paths = [folder / "snapshots" / entry for entry in entries(folder / "snapshots")]
    for path in sorted(paths, key=lambda path: (path.name != main, -path.stat().st_mtime)):
        if is_model_directory(path):
            yield {name: path}
        elif ggufs := files_in(path, name):
            yield ggufs


def _unknown(name: str, models: Path) -> UnknownModelError:
    searched = [LOCAL, str(data_folder()), "the shipped models", *map(str, cache_folders())]
    searched.append("the models of LM Studio, llama.cpp and Ollama")

    def similarity(known: str) -> float:  # whole name, or the part after the owner
        candidates = (known, known.rpartition("/")[2])
        return max(difflib.SequenceMatcher(None, name, text).ratio() for text in candidates)

    closest = sorted(list_models(models), key=similarity, reverse=True)
    return UnknownModelError(
        f"model {name[:200]!r} does not exist: not a path, and not in {', '.join(searched)}",
        f"choose one of these models: {join_names(closest)}",
    )
