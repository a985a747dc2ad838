"""Which model a name means: a path, or what lies in one of the folders where models are kept.

In order: a path; ./models; the user's data folder; the model that comes with tgen; what
transformers has downloaded before. Nothing is ever downloaded.
"""

import difflib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tgen.errors import ModelError, TgenError
from tgen.storage import files

LOCAL, DATA, SHIPPED = "./models", "the data folder", "the model that comes with tgen"
CACHE = "the transformers cache"
_PART = re.compile(r"\w[\w.-]*")  # of a name on the hub
_LISTED = 8  # names that an error tells


class ModelLocation(NamedTuple):
    """Where a model lies, and which rule found it there."""

    path: Path
    rule: str


def find_model(name: str | None, *, models: Path = Path("models")) -> ModelLocation:
    """What `name` means; without one the newest in `models`, else the shipped model.

    Raises ModelError, with the names that there are, if it means nothing.
    """
    if name is None:
        return _newest(models)
    here = ModelLocation(Path(name), "a path") if name.strip() and os.path.exists(name) else None
    if here and (here.path.is_file() or (here.path / "config.json").exists()):
        return here
    if _is_plain(name):
        for folder, rule in ((models, LOCAL), (data_folder(), DATA)):
            if os.path.exists(folder / name):
                return ModelLocation(folder / name, rule)
        if name == shipped_model().name:
            return ModelLocation(shipped_model(), SHIPPED)
        if cached := _in_cache(name):
            return ModelLocation(cached, CACHE)
    if here:
        return here
    raise _unknown(name, models)


def known_names(models: Path = Path("models")) -> list[str]:
    """The names of all models that are found without their paths, once each."""
    found = [*_names(models), *_names(data_folder()), shipped_model().name]
    return list(dict.fromkeys([*found, *_cached()]))


def shipped_model() -> Path:
    """The model that comes with tgen: inside the installed package, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "models" / "shakespeare"
    return inside if inside.exists() else package.parent.parent / "models" / "shakespeare"


def data_folder() -> Path:
    """Where the user keeps models for all of their folders, as the platform has it."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        given = Path(os.environ.get("XDG_DATA_HOME", ""))
        base = given if given.is_absolute() else home / ".local" / "share"
    return base / "tgen" / "models"


def cache_folders() -> list[Path]:
    """Where transformers keeps what it downloads."""
    own, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = [own or "", f"{home}/hub" if home else "", f"{caches}/huggingface/hub"]
    return list(dict.fromkeys(Path(os.path.expanduser(name)) for name in named if name))


def _is_plain(name: str) -> bool:
    """Whether it stays in the folder that it is looked for in."""
    parts = re.split(r"[/\\]", name)
    return not any(part.strip(". ") == "" or ":" in part or "\0" in part for part in parts)


def _newest(models: Path) -> ModelLocation:
    shipped = shipped_model()
    trained = [models / name for name in _names(models) if (models / name).resolve() != shipped]
    if not trained:
        return ModelLocation(shipped, SHIPPED)
    return ModelLocation(max(trained, key=_changed), f"the newest in {LOCAL}")


def _changed(folder: Path) -> float:
    weights = folder / "model.safetensors"
    return weights.stat().st_mtime if weights.exists() else 0.0


def _names(folder: Path) -> list[str]:
    """The models in a folder."""
    return [name for name in _entries(folder) if os.path.exists(folder / name / "config.json")]


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # there is none, or it is not ours to read
        return []


def _in_cache(name: str) -> Path | None:
    """The snapshot of `owner/name`, or of `name` alone if one owner has it."""
    cached = _cached()
    alike = [name] if name in cached else [one for one in cached if one.endswith(f"/{name}")]
    if len(alike) > 1:
        raise ModelError(f"model {name!r} has several owners", f"name one: {_listed(alike)}")
    return cached[alike[0]] if alike else None


def _cached() -> dict[str, Path]:
    """The snapshots of all models in the caches, by their names."""
    found: dict[str, Path] = {}
    for folder in cache_folders():
        for entry in _entries(folder):
            kind, *parts = entry.split("--")
            sound = len(parts) in (1, 2) and all(map(_PART.fullmatch, parts))
            if kind == "models" and sound and "/".join(parts) not in found:
                for snapshot in _snapshots(folder / entry):
                    found["/".join(parts)] = snapshot
                    break
    return found


def _snapshots(folder: Path) -> Iterator[Path]:
    """Those with a model in them: what the main branch was at first, then the newest."""
    try:
        main = files.read(folder / "refs" / "main", limit=100).decode("ascii", "replace").strip()
    except TgenError:
        main = ""
    paths = [folder / "snapshots" / name for name in _names(folder / "snapshots")]
    yield from sorted(paths, key=lambda path: (path.name != main, -path.stat().st_mtime))


def _unknown(name: str, models: Path) -> ModelError:
    places = [LOCAL, str(data_folder()), "the shipped ones", *map(str, cache_folders())]
    names = known_names(models)
    # Of `owner/name` each part may be what was meant.
    likeness = {one: difflib.SequenceMatcher(None, name, one).ratio() for one in names}
    for one in names:
        last = one.rpartition("/")[2]
        likeness[one] = max(likeness[one], difflib.SequenceMatcher(None, name, last).ratio())
    closest = sorted(names, key=lambda one: -likeness[one])
    what = f"model {name[:200]!r} does not exist: no path, and not in "
    return ModelError(what + ", ".join(places), f"there are: {_listed(closest)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
