"""GGUF files by name, in folders and in the caches of other programs."""

import json
import os
import sys
from pathlib import Path

import pytest

from tgen.checkpoint import stored_models
from tgen.checkpoint.model_lookup import CACHE, DATA, LOCAL, data_folder, find_model, list_models
from tgen.errors import ModelError

COMMIT = "a" * 40
ENVIRONMENT = (
    *("XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS"),
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, with an empty working folder beside it."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "home" / "local"))
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def add_file(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


def add_ollama(root, name, content, media="application/vnd.ollama.image.model"):
    """A model as Ollama stores it: `name` is host/owner/model/tag."""
    digest = f"sha256:{content * 64}"
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {"mediaType": media, "digest": digest},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return add_file(root / "blobs" / digest.replace(":", "-"))


@pytest.mark.parametrize("in_data", [False, True])
def test_file_in_a_models_folder_is_found_with_and_without_its_ending(home, in_data):  # noqa: ARG001
    folder, found_by = (data_folder(), DATA) if in_data else (Path("models"), LOCAL)
    path = add_file(folder / "plays-Q8_0.gguf")
    assert find_model("plays-Q8_0") == (path, found_by)
    assert find_model("plays-Q8_0.gguf") == (path, found_by)
    only = add_file(folder / "poems" / "poems-v2.Q4_0.gguf")
    assert find_model("poems") == (only, found_by)
    assert {"plays-Q8_0", "poems"} <= set(list_models())


def test_folder_with_several_types_needs_the_type(home):  # noqa: ARG001
    folder = Path("models/plays")
    paths = {kind: add_file(folder / f"plays-{kind}.gguf") for kind in ("Q4_K_M", "Q8_0", "F16")}
    add_file(folder / "mmproj-plays-F16.gguf")
    add_file(folder / "imatrix.gguf")
    for kind, path in paths.items():
        assert find_model(f"plays:{kind}") == (path, LOCAL)
        assert find_model(f"plays:{kind.lower()}").path == path
        assert find_model(f"models/plays:{kind}") == (path, "a path")
    for name in ("plays", "models/plays"):
        with pytest.raises(ModelError, match="exists with several types") as error:
            find_model(name)
        choices = ", ".join(f"{name}:{kind}" for kind in ("F16", "Q4_K_M", "Q8_0"))
        assert error.value.hint == f"choose one of {choices}"
    with pytest.raises(ModelError, match="does not exist"):
        find_model("plays:Q2_K")


def test_folder_given_as_a_path_is_its_only_file(home):  # noqa: ARG001
    path = add_file(Path("download/model.gguf"))
    assert find_model("download") == (path, "a path")


def test_parts_of_a_model_are_one_model(home):  # noqa: ARG001
    first = add_file(Path("models/big/big-Q8_0-00001-of-00002.gguf"))
    add_file(Path("models/big/big-Q8_0-00002-of-00002.gguf"))
    assert find_model("big").path == first


def test_files_in_the_hugging_face_cache_are_found(home):
    hub = home / ".cache" / "huggingface" / "hub"
    snapshot = hub / "models--owner--plays-GGUF" / "snapshots" / COMMIT
    blob = add_file(hub / "models--owner--plays-GGUF" / "blobs" / "0")
    snapshot.mkdir(parents=True)
    os.symlink(blob, snapshot / "plays-Q4_0.gguf")
    assert find_model("owner/plays-GGUF") == (snapshot / "plays-Q4_0.gguf", CACHE)
    assert find_model("plays-GGUF").path == snapshot / "plays-Q4_0.gguf"
    os.symlink(blob, snapshot / "plays-Q8_0.gguf")
    assert find_model("plays-GGUF:q8_0").path == snapshot / "plays-Q8_0.gguf"
    assert find_model("owner/plays-GGUF:Q4_0").path == snapshot / "plays-Q4_0.gguf"
    (snapshot / "config.json").write_text("{}")  # without weights it is not a model
    assert find_model("plays-GGUF:Q8_0").path == snapshot / "plays-Q8_0.gguf"
    (snapshot / "model.safetensors").write_bytes(b"")
    assert find_model("plays-GGUF").path == snapshot
    blob.unlink()  # broken links are not models
    assert find_model("plays-GGUF").path == snapshot


def test_models_of_lm_studio_are_found(home):
    path = add_file(home / ".lmstudio/models/owner/plays-GGUF/plays-Q4_0.gguf")
    old = add_file(home / ".cache/lm-studio/models/owner/old-GGUF/old.Q8_0.gguf")
    assert find_model("owner/plays-GGUF") == (path, "LM Studio")
    assert find_model("old-GGUF") == (old, "LM Studio")


def test_type_of_several_files_is_ambiguous(home):  # noqa: ARG001
    for name in ("plays-Q4_0", "poems-q4_0", "odes-Q8_0"):
        add_file(Path("models", "many", f"{name}.gguf"))
    with pytest.raises(ModelError, match="several files of this type") as caught:
        find_model("many:q4_0")
    assert caught.value.hint == "choose one of many:plays-Q4_0, many:poems-q4_0"
    assert find_model("many:Q8_0").path.name == "odes-Q8_0.gguf"


def test_folder_of_gguf_files_may_have_a_config(home):  # noqa: ARG001
    folder = Path("models", "plays-GGUF")
    path = add_file(folder / "plays-Q8_0.gguf")
    (folder / "config.json").write_text("{}")
    assert find_model("plays-GGUF").path == find_model(str(folder)).path == path
    add_file(folder / "plays-Q4_0.gguf")
    for name in ("plays-GGUF:Q8_0", f"{folder}:Q8_0"):
        assert find_model(name).path == path
    add_file(folder / "model.safetensors")
    assert find_model("plays-GGUF").path == folder


@pytest.mark.parametrize(
    ("platform", "folder"),
    [
        ("linux", ".cache/llama.cpp"),
        ("darwin", "Library/Caches/llama.cpp"),
        ("win32", "local/llama.cpp"),
    ],
)
def test_models_of_llama_cpp_are_found(home, platform, folder, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    folder = home / folder
    path = add_file(folder / "owner_plays-GGUF_plays-Q4_0.gguf")
    assert find_model("owner_plays-GGUF_plays-Q4_0") == (path, "llama.cpp's cache")
    (folder / "manifest=owner=plays-GGUF=latest.json").write_text("{}")
    assert find_model("owner/plays-GGUF") == (path, "llama.cpp's cache")
    other = add_file(folder / "owner_plays-GGUF_plays-Q8_0.gguf")
    assert find_model("plays-GGUF:Q8_0").path == other
    for part in ("mmproj-f16", "plays-Q6_K-00002-of-00002"):  # not models
        add_file(folder / f"owner_plays-GGUF_{part}.gguf")
    assert {name for name in list_models() if "owner" in name} == {
        "owner/plays-GGUF:Q4_0",
        "owner/plays-GGUF:Q8_0",
    }
    monkeypatch.setenv("LLAMA_CACHE", str(home / "elsewhere"))
    moved = add_file(home / "elsewhere" / "poems.gguf")
    assert find_model("poems").path == moved


def test_models_of_ollama_are_found(home, monkeypatch):
    root = home / ".ollama" / "models"
    latest = add_ollama(root, "registry.ollama.ai/library/plays/latest", "1")
    small = add_ollama(root, "registry.ollama.ai/library/plays/270m", "2")
    owned = add_ollama(root, "registry.ollama.ai/owner/poems/latest", "3")
    hub = add_ollama(root, "hf.co/owner/letters-GGUF/Q4_0", "4")
    assert find_model("plays") == (latest, "Ollama")
    assert find_model("plays:latest").path == latest
    assert find_model("plays:270m").path == small
    assert find_model("owner/poems").path == owned
    assert find_model("hf.co/owner/letters-GGUF:Q4_0").path == hub
    for name in ("plays", "plays:270m", "owner/poems"):
        assert name in list_models()
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    with pytest.raises(ModelError, match="does not exist"):
        find_model("plays:270m")
    monkeypatch.delenv("OLLAMA_MODELS")
    trained = Path("models", "plays")
    trained.mkdir(parents=True)
    (trained / "config.json").write_text("{}")
    assert find_model("plays").path == trained
    assert find_model("plays:270m").path == small


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b'{"layers": 1}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../x"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": 1}]}',
    ],
)
def test_damaged_manifests_of_ollama_are_skipped(manifest, home):
    root = home / ".ollama" / "models"
    add_ollama(root, "registry.ollama.ai/library/plays/latest", "1")
    (root / "manifests/registry.ollama.ai/library/plays/latest").write_bytes(manifest)
    with pytest.raises(ModelError, match="does not exist"):
        find_model("plays")


@pytest.mark.parametrize("name", ["../outside:Q8_0", "..:Q8_0", "inside:../Q8_0", "C:outside", ":"])
def test_names_with_types_cannot_leave_the_folders(home, name):  # noqa: ARG001
    add_file(Path("models/inside/a-Q8_0.gguf"))
    add_file(Path("models/inside/a-Q4_0.gguf"))
    add_file(data_folder().parent / "outside" / "a-Q8_0.gguf")
    with pytest.raises(ModelError, match="does not exist"):
        find_model(name, models=Path("models"))


def test_several_owners_are_ambiguous(home):
    for owner in ("one", "two"):
        add_file(home / ".lmstudio/models" / owner / "plays-GGUF/plays-Q4_0.gguf")
    with pytest.raises(ModelError, match="from several owners") as error:
        find_model("plays-GGUF")
    assert error.value.hint == "choose one of one/plays-GGUF, two/plays-GGUF"


def test_odd_file_names_are_not_models(home):  # noqa: ARG001
    for name in ("a\nb.gguf", "\x1b[31m.gguf", ".hidden.gguf", ".gguf"):
        add_file(Path("models") / name)
    assert stored_models.models_in(Path("models")) == {}


def test_exact_name_is_not_ambiguous():
    named = {"llama3:8b": Path("a"), "someone/llama3:8b": Path("b")}
    assert stored_models.select(named, "llama3:8b") == "llama3:8b"
    assert stored_models.select(named, "someone/llama3:8b") == "someone/llama3:8b"


def test_files_of_one_type_keep_names_of_their_own(tmp_path):
    for name in ("a-Q8_0", "b-Q8_0", "a-Q4_0"):
        add_file(tmp_path / f"{name}.gguf")
    assert set(stored_models.files_in(tmp_path, "m")) == {"m:a-Q8_0", "m:b-Q8_0", "m:Q4_0"}
