"""GGUF files by name: those in a folder, and those that other programs have downloaded.

A folder with one GGUF file has its name. If there are several, each has the folder's name with its
type, as in "gemma-3-270m-it-GGUF:Q8_0". Nothing is ever downloaded or changed.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tgen.errors import ModelError, TgenError
from tgen.storage import files

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
ADAPTER_TORCH_WEIGHTS = "adapter_model.bin"  # PEFT's before version 0.6
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_NAME = re.compile(r"\w[\w.+-]*")  # of a folder or file; others are not models'
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|MXFP4)\w*)$", re.IGNORECASE)
_LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}$")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_OTHER_FILES = ("mmproj", "imatrix")  # image encoders; statistics for quantization
_MANIFEST = re.compile(r"manifest=([^=]+)=([^=]+)=[^=]+\.json")  # llama.cpp's: owner, repository
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_MANIFEST_LIMIT = 1 << 20  # bytes


def select(named: Mapping[str, Path], name: str) -> str | None:
    """Return the full name, of `named`, that `name` means: it may lack the owner and the type.

    Raises ModelError if there are several.
    """
    if name in named:
        return name
    base, _, kind = name.removesuffix(":latest").partition(":")  # Ollama's default type
    parts = {full: full.partition(":") for full in named}
    kinds = {f: own for f, (owned, _, own) in parts.items() if f"/{owned}".endswith(f"/{base}")}
    found = [full for full, own in kinds.items() if own.lower() == kind.lower()]
    several = "from several owners"
    if not found and not kind:
        found = list(kinds)
        if len({parts[full][0] for full in found}) == 1:
            several = "with several types"
    elif not found:
        several = "with several files of this type"
        end = re.compile(rf"[-._]{re.escape(kind)}$", re.IGNORECASE)
        files_of_type = [full for full, own in kinds.items() if end.search(own)]
        found = files_of_type if len(files_of_type) > 1 else []
    if len(found) > 1:
        raise ModelError(
            f"model {name!r} exists {several}", f"choose one of {join_names(sorted(found))}"
        )
    return found[0] if found else None


def join_names(names: list[str], limit: int = 8) -> str:
    """Join the first names for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def files_in(folder: Path, name: str) -> dict[str, Path]:
    """Return the GGUF models inside a folder, by names that start with `name`."""
    stems = {folder / entry: stem for entry in entries(folder) if (stem := _stem(entry))}
    existing = {path: stem for path, stem in stems.items() if os.path.isfile(path)}
    return _name_by_type(name, existing)


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of a GGUF model in order: those that belong to a file named as a part by
    llama-gguf-split, whether they exist or not; else the file alone."""
    match = _PART.fullmatch(path.name)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return [path]
    n = range(1, int(match[3]) + 1)
    return [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in n]


def is_adapter(path: Path) -> bool:
    """Return whether a path is a directory with an adapter and no model."""
    try:
        return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").exists()
    except OSError:  # a name that is too long
        return False


def is_model_directory(path: Path) -> bool:
    """Return whether a directory has a transformers model, not only GGUF files and config.json, or
    an adapter."""
    if os.path.isfile(path / ADAPTER_CONFIG):
        return True
    if not os.path.exists(path / "config.json"):  # False for names that are too long
        return False
    return not files_in(path, path.name) or any(path.glob("*.safetensors"))


def _name_by_type(name: str, stems: Mapping[Path, str]) -> dict[str, Path]:
    """Return the models among files, given with their names without ending."""
    models = {path: stem for path, stem in stems.items() if _is_model(stem)}
    if len(models) == 1:
        (path,) = models
        return {name: path}
    kinds = {path: _type_of(stem) for path, stem in models.items()}
    n_of_type = Counter(kind.lower() for kind in kinds.values())
    return {
        f"{name}:{kind if n_of_type[kind.lower()] == 1 else models[path]}": path
        for path, kind in kinds.items()
    }


def models_in(folder: Path) -> dict[str, Path]:
    """Return the GGUF models of a folder of models: files, and folders of files."""
    models: dict[str, Path] = {}
    for entry in entries(folder):
        if _is_model(stem := _stem(entry)) and os.path.isfile(folder / entry):
            models[stem] = folder / entry
        elif _NAME.fullmatch(entry) and not is_model_directory(folder / entry):
            models |= files_in(folder / entry, entry)
    return models


def downloaded_models() -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield the name of each program and its models."""
    yield "LM Studio", _lm_studio()
    yield "llama.cpp's cache", _llama_cpp()
    yield "Ollama", _ollama()


def _lm_studio() -> dict[str, Path]:
    home = Path(os.path.expanduser("~"))
    models: dict[str, Path] = {}
    for root in (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"):
        for owner in filter(_NAME.fullmatch, entries(root)):
            for repository in filter(_NAME.fullmatch, entries(root / owner)):
                name = f"{owner}/{repository}"
                models = files_in(root / owner / repository, name) | models
    return models


def _llama_cpp() -> dict[str, Path]:
    """Files named <owner>_<repository>_<file>, of which a manifest names the first two."""
    folder = _llama_cpp_folder()
    names = entries(folder)
    stems = {folder / name: stem for name in names if (stem := _stem(name))}
    models: dict[str, Path] = {}
    for owner, repository in sorted({m.groups() for m in map(_MANIFEST.fullmatch, names) if m}):
        prefix = f"{owner}_{repository}_"
        own = {path: stem for path, stem in stems.items() if stem.startswith(prefix)}
        short = {path: stem.removeprefix(prefix) for path, stem in own.items()}
        models |= _name_by_type(f"{owner}/{repository}", short)
        stems = {path: stem for path, stem in stems.items() if path not in own}
    return models | {stem: path for path, stem in stems.items() if _is_model(stem)}


def _llama_cpp_folder() -> Path:
    home = Path(os.path.expanduser("~"))
    if folder := os.environ.get("LLAMA_CACHE"):
        return Path(folder)
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "llama.cpp"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "llama.cpp"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "llama.cpp"


def _ollama() -> dict[str, Path]:
    """Models of manifests/<host>/<owner>/<model>/<tag>, which name files in blobs/."""
    folder = os.environ.get("OLLAMA_MODELS")
    root = Path(folder) if folder else Path(os.path.expanduser("~")) / ".ollama" / "models"
    manifests = root / "manifests"
    models: dict[str, Path] = {}
    for host, owner, model, tag in _names_below(manifests, 4):
        path = _ollama_blob(root, manifests / host / owner / model / tag)
        name = f"{owner}/{model}" if host == "registry.ollama.ai" else f"{host}/{owner}/{model}"
        if path is not None:
            models[f"{name.removeprefix('library/')}:{tag}"] = path
    return {name.removesuffix(":latest"): path for name, path in models.items()}


def _names_below(folder: Path, depth: int) -> Iterator[tuple[str, ...]]:
    """Yield the names on every path that is `depth` entries long."""
    for name in filter(_NAME.fullmatch, entries(folder)):
        if depth == 1:
            yield (name,)
        else:
            yield from ((name, *rest) for rest in _names_below(folder / name, depth - 1))


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    try:
        layers = json.loads(files.read(manifest, limit=_MANIFEST_LIMIT))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
    except (TgenError, OSError, ValueError, KeyError, TypeError):
        return None
    if len(digests) != 1 or not isinstance(digests[0], str) or not _DIGEST.fullmatch(digests[0]):
        return None
    path = root / "blobs" / digests[0].replace(":", "-")
    return path if path.is_file() else None


def _stem(entry: str) -> str:
    """Return the name of a GGUF file without its ending; empty for other files."""
    stem = entry.removesuffix(".gguf")
    return stem if stem != entry and _NAME.fullmatch(stem) else ""


def _is_model(stem: str) -> bool:
    return bool(stem) and not stem.lower().startswith(_OTHER_FILES) and not _LATER_PART.search(stem)


def _type_of(stem: str) -> str:
    match = _TYPE.search(re.sub(r"-00001-of-\d{5}$", "", stem))
    return match[1] if match else stem


def entries(folder: Path) -> list[str]:
    """Return the names in a folder; none if it is missing or unreadable."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):  # missing, unreadable, or not a file name
        return []
