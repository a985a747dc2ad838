"""Which model a name means."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from support.command import tgen
from tgen.api import load
from tgen.checkpoint.model_lookup import (
    CACHE,
    DATA,
    LOCAL,
    SHIPPED,
    cache_folders,
    data_folder,
    find_model,
    known_names,
    shipped_model,
)
from tgen.errors import ModelError

NEWER, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An empty home and working folder of their own."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "home" / "local"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def cached(hub: Path, name: str, commit: str, *, main: bool = True) -> Path:
    """As the hub's library lays a download out."""
    folder = hub / ("models--" + name.replace("/", "--"))
    if main:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return put(folder / "snapshots" / commit)


def test_every_place_is_looked_in_and_the_first_counts(places, monkeypatch):
    hub = places / "home" / ".cache" / "huggingface" / "hub"
    steps = [
        (cached(hub, "someone/plays", NEWER), CACHE),
        (put(data_folder() / "plays"), DATA),
        (put(Path("models/plays")), LOCAL),
        (put(Path("plays")), "a path"),
    ]
    assert find_model("plays") == steps[-1]
    for gone, left in zip(reversed(steps), reversed(steps[:-1]), strict=False):
        shutil.rmtree(gone[0])
        assert find_model("plays") == left
    assert find_model("someone/plays") == steps[0]
    assert find_model(shipped_model().name) == (shipped_model(), SHIPPED)
    # Each of the variables names a cache, the more particular one first.
    first, second = places / "one", places / "two" / "hub"
    monkeypatch.setenv("HF_HOME", str(places / "two"))
    assert find_model("plays").path == steps[0][0]
    in_home = cached(second, "someone/plays", OLDER)
    assert find_model("plays").path == in_home
    monkeypatch.setenv("HF_HUB_CACHE", str(first))
    assert find_model("plays").path == in_home
    own = cached(first, "someone/plays", OLDER)
    assert find_model("plays").path == own


@pytest.mark.parametrize(
    ("platform", "folder"),
    [
        ("linux", ".local/share/tgen/models"),
        ("darwin", "Library/Application Support/tgen/models"),
        ("win32", "local/tgen/models"),
    ],
)
def test_the_data_folder_is_the_platforms(places, monkeypatch, platform, folder):
    monkeypatch.setattr(sys, "platform", platform)
    assert data_folder() == places / "home" / folder
    monkeypatch.setenv("XDG_DATA_HOME", str(places / "data"))
    if platform == "linux":
        assert data_folder() == places / "data" / "tgen" / "models"
        monkeypatch.setenv("XDG_DATA_HOME", "relative")  # the standard says: passed over
    assert data_folder() == places / "home" / folder


def test_a_cached_model_is_its_main_branch(places):
    hub = places / "home" / ".cache" / "huggingface" / "hub"
    other = cached(hub, "someone/plays", OLDER, main=False)
    main = cached(hub, "someone/plays", NEWER)
    os.utime(other, (2e9, 2e9))
    assert find_model("plays").path == main
    (main.parent.parent / "refs" / "main").write_text("../../../elsewhere")  # then the newest
    assert find_model("plays").path == other
    (main.parent.parent / "refs" / "main").unlink()
    assert find_model("plays").path == other
    (other / "config.json").unlink()  # only begun
    assert find_model("plays").path == main
    alone = cached(hub, "gpt", NEWER)  # old ones have no owner
    assert find_model("gpt") == (alone, CACHE)


def test_a_name_of_two_owners_is_refused(places):
    hub = places / "home" / ".cache" / "huggingface" / "hub"
    for owner in ("one", "two"):
        cached(hub, f"{owner}/plays", NEWER)
    with pytest.raises(ModelError, match="several owners") as caught:
        find_model("plays")
    assert caught.value.hint == "name one: one/plays, two/plays"
    assert "two--plays" in str(find_model("two/plays").path)


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", ".", "..", "../outside", "inside/../../outside", "..\\outside", "C:outside"),
        *("/outside", "out\0side", "inside//part", "inside/", "~", "*", "x" * 5000),
        *("models--someone--plays", "../models--someone--plays", "someone/../plays"),
    ],
)
def test_no_name_leads_out_of_the_folders(places, monkeypatch, name):
    (places / "empty").mkdir()
    monkeypatch.chdir(places / "empty")
    models = places / "work" / "models"
    for folder in (models, data_folder()):
        put(folder / "inside" / "part")
        put(folder.parent / "outside")
    cached(places / "home" / ".cache" / "huggingface" / "hub", "someone/plays", NEWER)
    assert find_model("inside/part", models=models).rule == LOCAL
    if name in (".", ".."):  # paths, and there
        assert find_model(name, models=models) == (Path(name), "a path")
        return
    with pytest.raises(ModelError, match="does not exist"):
        find_model(name, models=models)


def test_an_unknown_name_is_told_what_there_is(places):
    hub = places / "home" / ".cache" / "huggingface" / "hub"
    for name in ("poems", "letters"):
        put(Path("models") / name)
    put(data_folder() / "sonnets")
    cached(hub, "someone/plays", NEWER)
    (hub / "datasets--someone--plays").mkdir()
    (hub / "models--..--plays" / "snapshots" / NEWER).mkdir(parents=True)
    names = ["letters", "poems", "sonnets", "shakespeare", "someone/plays"]
    assert known_names() == names
    for typed, closest in [("peoms", "poems"), ("play", "someone/plays"), ("sonnet", "sonnets")]:
        with pytest.raises(ModelError) as caught:
            find_model(typed)
        assert f"'{typed}' does not exist" in caught.value.message
        for place in ("./models", str(data_folder()), "shipped", str(hub)):
            assert place in caught.value.message
        assert caught.value.hint.startswith(f"there are: {closest}, ")
        assert all(name in caught.value.hint for name in names)


def test_without_a_name_the_newest_else_the_shipped_one(places):  # noqa: ARG001
    assert find_model(None) == (shipped_model(), SHIPPED)
    put(data_folder() / "other")  # only ./models counts
    assert find_model(None) == (shipped_model(), SHIPPED)
    for i, name in enumerate(("new", "old")):
        put(Path("models") / name)
        (Path("models") / name / "model.safetensors").write_bytes(b"")
        os.utime(Path("models") / name / "model.safetensors", (2e9 - i, 2e9 - i))
    assert find_model(None) == (Path("models/new"), "the newest in ./models")


def test_the_commands_take_names_and_say_where_they_were_found(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # not HOME: compiled kernels are there
    snapshot = tmp_path / "models--someone--plays" / "snapshots" / NEWER
    shutil.copytree(trained, snapshot, ignore=shutil.ignore_patterns("training"))
    result = tgen("inspect", "-m", "someone/plays", "--view", "model")
    assert f"{snapshot} (the transformers cache)" in result.stdout.decode()
    result = tgen("inspect", "-m", "plays", "--view", "model", "--json")
    found = json.loads(result.stdout)["model"]
    assert (found["path"], found["found_by"]) == (str(snapshot), "the transformers cache")
    result = tgen("generate", "-m", "plays", "-p", "The", "-n", 1)
    assert str(snapshot) in result.stderr.decode()
    assert load("plays").bundle.path == snapshot
    result = tgen("generate", "-m", "plaid", "-p", "The")
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 2
    assert b"there are: someone/plays, " in result.stderr


def test_a_folder_that_is_no_model_hides_none(places):  # noqa: ARG001
    models = Path("models")
    (models / "plays").mkdir(parents=True)
    (models / "plays" / "config.json").write_text("{}")
    Path("plays").mkdir()  # the texts, say
    assert find_model("plays").rule == "./models"
    Path("texts").mkdir()
    assert find_model("texts").path == Path("texts")  # and what it lacks is said of it


def test_the_cache_is_where_the_environment_says(monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folders() == [Path("/caches/huggingface/hub")]
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert cache_folders()[0] == Path("~/hf/hub").expanduser()
