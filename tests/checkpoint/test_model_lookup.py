"""The model that a name refers to."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tgen.checkpoint.model_lookup import (
    CACHE,
    CHECKPOINT,
    DATA,
    LOCAL,
    SHIPPED,
    cache_folders,
    data_folder,
    find_model,
    list_models,
    shipped_model,
)
from tgen.errors import ModelError
from tgen.python_api import load
from tgen.storage.files import make_folder, replacing

NEWER, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def empty_home(tmp_path, monkeypatch):
    """An empty home and working folder."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "home" / "local"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def add_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def add_cached_model(hub: Path, name: str, commit: str, *, main: bool = True) -> Path:
    """A download, as the Hugging Face library stores it."""
    folder = hub / ("models--" + name.replace("/", "--"))
    if main:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return add_model(folder / "snapshots" / commit)


def test_locations_are_searched_in_order(empty_home, monkeypatch):
    hub = empty_home / "home" / ".cache" / "huggingface" / "hub"
    steps = [
        (add_cached_model(hub, "someone/plays", NEWER), CACHE),
        (add_model(data_folder() / "plays"), DATA),
        (add_model(Path("models/plays")), LOCAL),
        (add_model(Path("plays")), "a path"),
    ]
    assert find_model("plays") == steps[-1]
    for removed, expected in zip(reversed(steps), reversed(steps[:-1]), strict=False):
        shutil.rmtree(removed[0])
        assert find_model("plays") == expected
    assert find_model("someone/plays") == steps[0]
    assert find_model(shipped_model().name) == (shipped_model(), SHIPPED)
    # Each variable adds a cache; the more specific one comes first.
    first, second = empty_home / "one", empty_home / "two" / "hub"
    monkeypatch.setenv("HF_HOME", str(empty_home / "two"))
    assert find_model("plays").path == steps[0][0]
    in_home = add_cached_model(second, "someone/plays", OLDER)
    assert find_model("plays").path == in_home
    monkeypatch.setenv("HF_HUB_CACHE", str(first))
    assert find_model("plays").path == in_home
    own = add_cached_model(first, "someone/plays", OLDER)
    assert find_model("plays").path == own


@pytest.mark.parametrize(
    ("platform", "folder"),
    [
        ("linux", ".local/share/tgen/models"),
        ("darwin", "Library/Application Support/tgen/models"),
        ("win32", "local/tgen/models"),
    ],
)
def test_data_folder_follows_the_platform(empty_home, monkeypatch, platform, folder):
    monkeypatch.setattr(sys, "platform", platform)
    assert data_folder() == empty_home / "home" / folder
    monkeypatch.setenv("XDG_DATA_HOME", str(empty_home / "data"))
    if platform == "linux":
        assert data_folder() == empty_home / "data" / "tgen" / "models"
        monkeypatch.setenv("XDG_DATA_HOME", "relative")  # ignored, as XDG says
    assert data_folder() == empty_home / "home" / folder


def test_cached_model_is_the_main_branch(empty_home):
    hub = empty_home / "home" / ".cache" / "huggingface" / "hub"
    other = add_cached_model(hub, "someone/plays", OLDER, main=False)
    main = add_cached_model(hub, "someone/plays", NEWER)
    os.utime(other, (2e9, 2e9))
    assert find_model("plays").path == main
    (main.parent.parent / "refs" / "main").write_text("../../../elsewhere")  # then the newest
    assert find_model("plays").path == other
    (main.parent.parent / "refs" / "main").unlink()
    assert find_model("plays").path == other
    (other / "config.json").unlink()  # incomplete
    assert find_model("plays").path == main
    alone = add_cached_model(hub, "gpt", NEWER)  # old models have no owner
    assert find_model("gpt") == (alone, CACHE)


def test_name_with_two_owners_is_ambiguous(empty_home):
    hub = empty_home / "home" / ".cache" / "huggingface" / "hub"
    for owner in ("one", "two"):
        add_cached_model(hub, f"{owner}/plays", NEWER)
    with pytest.raises(ModelError, match="several owners") as caught:
        find_model("plays")
    assert caught.value.hint == "choose one of one/plays, two/plays"
    assert "two--plays" in str(find_model("two/plays").path)


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", ".", "..", "../outside", "inside/../../outside", "..\\outside", "C:outside"),
        *("/outside", "out\0side", "inside//part", "inside/", "~", "*", "x" * 5000),
        *("models--someone--plays", "../models--someone--plays", "someone/../plays"),
    ],
)
def test_names_cannot_leave_the_folders(empty_home, monkeypatch, name):
    (empty_home / "empty").mkdir()
    monkeypatch.chdir(empty_home / "empty")
    models = empty_home / "work" / "models"
    for folder in (models, data_folder()):
        add_model(folder / "inside" / "part")
        add_model(folder.parent / "outside")
    add_cached_model(empty_home / "home" / ".cache" / "huggingface" / "hub", "someone/plays", NEWER)
    assert find_model("inside/part", models=models).found_by == LOCAL
    if name in (".", ".."):  # existing paths
        assert find_model(name, models=models) == (Path(name), "a path")
        return
    with pytest.raises(ModelError, match="does not exist"):
        find_model(name, models=models)


def test_unknown_name_lists_the_known_models(empty_home):
    hub = empty_home / "home" / ".cache" / "huggingface" / "hub"
    for name in ("poems", "letters"):
        add_model(Path("models") / name)
    add_model(data_folder() / "sonnets")
    add_cached_model(hub, "someone/plays", NEWER)
    (hub / "datasets--someone--plays").mkdir()
    (hub / "models--..--plays" / "snapshots" / NEWER).mkdir(parents=True)
    names = ["letters", "poems", "sonnets", "shakespeare", "someone/plays"]
    assert list(list_models()) == names
    for typed, closest in [("peoms", "poems"), ("play", "someone/plays"), ("sonnet", "sonnets")]:
        with pytest.raises(ModelError) as caught:
            find_model(typed)
        assert f"'{typed}' does not exist" in caught.value.message
        for location in ("./models", str(data_folder()), "shipped", str(hub)):
            assert location in caught.value.message
        assert caught.value.hint.startswith(f"choose one of these models: {closest}, ")
        assert all(name in caught.value.hint for name in names)


def test_type_of_a_model_directory_is_refused(empty_home):  # noqa: ARG001
    add_model(Path("models") / "poems")
    for name in ("poems:Q8_0", "models/poems:Q8_0", str(Path("models/poems").resolve()) + ":f16"):
        with pytest.raises(ModelError, match="poems' is not a folder of GGUF files") as caught:
            find_model(name)
        assert caught.value.hint == f"use the name {name.rpartition(':')[0]}"


def test_default_is_the_newest_or_the_shipped_model(empty_home):  # noqa: ARG001
    assert find_model(None) == (shipped_model(), SHIPPED)
    add_model(data_folder() / "other")  # only ./models is searched
    assert find_model(None) == (shipped_model(), SHIPPED)
    for i, name in enumerate(("new", "old")):
        add_model(Path("models") / name)
        (Path("models") / name / "model.safetensors").write_bytes(b"")
        os.utime(Path("models") / name / "model.safetensors", (2e9 - i, 2e9 - i))
    assert find_model(None) == (Path("models/new"), "the newest in ./models")


def test_newest_model_may_be_in_shards(empty_home):  # noqa: ARG001
    for name, file, time in (
        ("whole", "model.safetensors", 1e9),
        ("shards", "model-00002-of-00002.safetensors", 2e9),
    ):
        add_model(Path("models") / name)
        (Path("models") / name / file).write_bytes(b"")
        os.utime(Path("models") / name / file, (time, time))
    assert find_model(None).path == Path("models/shards")


def test_model_that_is_being_written_is_not_found(empty_home):  # noqa: ARG001
    make_folder(Path("models"))
    with replacing(Path("models") / "new") as temporary:
        add_model(temporary)
        assert find_model(None).found_by == SHIPPED
        assert temporary.name not in list_models()
        with pytest.raises(ModelError, match="does not exist"):
            find_model(temporary.name)
    assert find_model(None).path == Path("models/new")


def test_commands_print_where_a_named_model_was_found(run_here, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # not HOME, which has the compiled kernels
    snapshot = tmp_path / "models--someone--plays" / "snapshots" / NEWER
    shutil.copytree(trained, snapshot, ignore=shutil.ignore_patterns("training"))
    result = run_here("inspect", "-m", "someone/plays", "--view", "model")
    assert f"{snapshot} (the transformers cache)" in result.stdout.decode()
    result = run_here("inspect", "-m", "plays", "--view", "model", "--json")
    actual = json.loads(result.stdout)["model"]
    assert (actual["path"], actual["found_by"]) == (str(snapshot), "the transformers cache")
    result = run_here("generate", "-m", "plays", "-p", "The", "-n", 1)
    assert str(snapshot) in result.stderr.decode()
    assert load("plays").path == snapshot
    result = run_here("generate", "-m", "plaid", "-p", "The")
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 2
    assert b"choose one of these models: someone/plays, " in result.stderr


def test_folder_without_a_model_does_not_hide_a_model(empty_home):  # noqa: ARG001
    models = Path("models")
    (models / "plays").mkdir(parents=True)
    (models / "plays" / "config.json").write_text("{}")
    Path("plays").mkdir()  # for example the texts
    assert find_model("plays").found_by == "./models"
    Path("texts").mkdir()
    assert find_model("texts").path == Path("texts")  # loading it names the missing file


def test_cache_folder_follows_the_environment(monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folders() == [Path("/caches/huggingface/hub")]
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert cache_folders()[0] == Path("~/hf/hub").expanduser()


@pytest.mark.parametrize("unreadable", ["models", "models/new"])
def test_unreadable_folder_is_not_skipped(unreadable, empty_home, monkeypatch):  # noqa: ARG001
    access, denied = os.access, Path("none")
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and path != denied)
    add_model(Path("models/old"))
    (Path("models/old") / "model.safetensors").write_bytes(b"")
    os.utime(Path("models/old") / "model.safetensors", (1e9, 1e9))
    Path("models/new").mkdir()
    assert find_model(None).path == Path("models/old")
    denied = Path(unreadable)
    with pytest.raises(ModelError) as caught:
        find_model(None)
    assert caught.value.message == f"cannot read {str(denied)!r}: permission denied"
    os.utime(denied, (5e8, 5e8))
    if unreadable == "models/new":  # older than the newest readable model
        assert find_model(None).path == Path("models/old")


def make_checkpoint(path, *, weights="model.safetensors"):
    make_folder(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    if weights:
        (path / weights).touch()


@pytest.mark.usefixtures("empty_home")
def test_directory_of_a_trainer_means_its_newest_checkpoint():
    for name in ("checkpoint-500", "checkpoint-1000", "checkpoint-90", "models/it/checkpoint-7"):
        make_checkpoint(Path("trainer", name) if "/" not in name else Path(name))
    make_checkpoint(Path("trainer/checkpoint-2000"), weights="")  # being written
    expected = (Path("trainer/checkpoint-1000"), CHECKPOINT)
    assert find_model("trainer") == expected
    assert find_model("it") == (Path("models/it/checkpoint-7"), CHECKPOINT)
    make_checkpoint(Path("trainer"))
    assert find_model("trainer") == (Path("trainer"), "a path")


@pytest.mark.usefixtures("empty_home")
def test_file_of_weights_means_its_directory():
    make_checkpoint(Path("it"), weights="model-00001-of-00002.safetensors")
    make_checkpoint(Path("old"), weights="pytorch_model.bin")
    assert find_model("it/model-00001-of-00002.safetensors").path == Path("it")
    assert find_model("old/pytorch_model.bin").path == Path("old")
    for other in ("it/pytorch_model.bin", "it/other.safetensors", "alone.safetensors"):
        Path(other).touch()  # not the weights that this model is loaded from
        assert find_model(other).path == Path(other)
