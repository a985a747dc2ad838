"""`tgen models`: lists what --model finds, and removes only after a yes."""

import io
import json
import re
import sys
from datetime import datetime
from pathlib import Path

import pytest

from support.adapters import save_adapter
from support.models import make_model
from support.runs import RUN_JSON
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import data_folder, find_model, list_models
from tgen.cli import rich_console
from tgen.cli.app import run
from tgen.runs.output_folder import lock_run
from tgen.storage.sealed_file import encode_header, publish_sealed
from tgen.storage.user_cache import cache_folder, is_private


@pytest.fixture
def places(tokenizer, tmp_path, monkeypatch):
    """A working directory, and models in all kinds of places."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "home" / "local"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    model = make_model("gpt2", vocab_size=tokenizer.vocab_size)
    cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    cached = cache / "models--someone--poems" / "snapshots" / "abc"
    for path in (Path("models/plays"), data_folder() / "plays", data_folder() / "notes", cached):
        model_dir.save(path, model.config, tokenizer, model.to_arrays())
    (data_folder() / "notes" / "config.json").write_text('{"model_type": "bert"}')
    return tmp_path / "work"


@pytest.fixture
def models(places, capsysbinary):
    """Run `tgen models` in that directory; return its status, stdout and stderr."""
    assert places.is_dir()

    def run_models(*arguments):
        status = run(["models", *map(str, arguments)])
        out, err = capsysbinary.readouterr()
        return status, out.decode(), err.decode()

    return run_models


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_list_has_every_name_that_is_found(models):
    status, out, err = models("--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["schema"] == "tgen.models/1"
    assert [one["name"] for one in record["models"]] == list(list_models())
    by_name = {one["name"]: one for one in record["models"]}
    for name, one in by_name.items():
        assert (Path(one["path"]), one["found_by"]) == find_model(name)
    plays = by_name["plays"]
    assert plays["path"] == str(Path("models/plays"))
    assert plays["is_default"]
    assert (plays["family"], plays["context_length"]) == ("gpt2", 48)
    assert datetime.fromisoformat(plays["modified"]).tzinfo is not None
    assert by_name["someone/poems"]["found_by"] == "the transformers cache"
    assert "bert" in by_name["notes"]["problem"]
    status, out, err = models()
    assert [line.split()[0] for line in out.splitlines()] == ["name", *by_name]
    assert "default: plays" in err
    assert "warning: notes: unknown model type" in err
    assert models("--quiet")[2] == ""


@pytest.mark.parametrize("width", [120, 80, 60, 45])
def test_a_terminal_of_any_width_shows_whole_names(models, monkeypatch, width):
    monkeypatch.setattr(rich_console.out, "_force_terminal", True)
    monkeypatch.setattr(rich_console.out, "_width", width)
    _, out, err = models()
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert all(len(line.rstrip()) <= width for line in plain.splitlines())
    assert [line.split()[0] for line in plain.splitlines()] == ["name", *list_models()]
    hidden = err.rpartition("not shown at this width: ")[2].split(";")[0].split(", ")
    names = ["written", "found in", "dtype", "context", "family"]
    assert [name for name in names if name not in plain] == (hidden if "not shown" in err else [])


def test_adapters_are_listed_with_their_base(models):
    save_adapter(Path("models/kb"), Path("models/plays"))
    status, out, err = models("--json")
    assert status == 0, err
    kb = next(one for one in json.loads(out)["models"] if one["name"] == "kb")
    assert (kb["adapter_of"], kb["rank"], kb["problem"]) == ("models/plays", 2, None)
    assert (kb["family"], kb["context_length"], kb["dtype"]) == ("gpt2", 48, "float32")
    assert kb["is_default"]
    _, out, err = models()
    assert "adapter of models/plays, rank 2" in out
    assert "default: kb" in err
    assert "kb:" not in err
    assert models("rm", "kb", "--yes")[0] == 0
    assert not Path("models/kb").exists()


def test_directories_with_gguf_files_are_not_models(models):
    Path("data").mkdir()
    Path("data/x.gguf").write_bytes(b"GGUF and more")
    Path("data/notes.txt").write_text("mine")
    status, _, err = models("rm", "data", "--yes")
    assert (status, Path("data/x.gguf").exists()) == (2, True)
    assert "error: data is not a model\nhint: name its GGUF file: data/x.gguf\n" in err
    assert models("rm", "data/x.gguf", "--yes")[0] == 0
    Path("x.gguf").write_bytes(b"GGUF and more")
    status, _, err = models("rm", ".", "--yes")
    assert (status, Path("x.gguf").exists()) == (2, True)


def test_listed_file_that_is_damaged_is_removed(models):
    Path("models/broken.gguf").write_bytes(b"not one")
    assert "broken" in models()[1]
    assert models("rm", "broken", "--yes")[0] == 0
    assert not Path("models/broken.gguf").exists()


def test_removing_needs_a_yes(models, monkeypatch):
    status, _, err = models("rm", "plays")
    assert status == 2
    assert "--yes" in err
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
        status, _, err = models("rm", "plays")
        assert (status, Path("models/plays").exists()) == (1, True)
        assert "remove models/plays (gpt2, " in err
        assert err.endswith("not removed\n")
    monkeypatch.setattr(sys, "stdin", _Terminal("y\n"))
    status, _, err = models("rm", "plays")
    assert (status, Path("models/plays").exists()) == (0, False)
    assert (data_folder() / "plays").exists()
    assert models("rm", "plays", "--yes")[0] == 0
    assert not (data_folder() / "plays").exists()
    assert models("rm", "plays", "--yes")[0] == 1


def test_models_of_others_and_running_ones_are_refused(models):
    status, _, err = models("rm", "someone/poems", "--yes")
    assert status == 2
    assert "belongs to the transformers cache" in err
    assert find_model("someone/poems").path.exists()
    assert models("rm", "shakespeare", "--yes")[0] == 2
    Path("models/plays/training").mkdir()
    Path("models/plays/training/run.json").write_text(RUN_JSON)
    with lock_run(Path("models/plays")):
        assert models("rm", "plays", "--yes")[0] == 75
    assert Path("models/plays/config.json").exists()


def test_wrong_options_are_usage_errors(models):
    for arguments in (["rm"], ["list", "plays"], ["rm", "plays", "--json"], ["--yes"], ["plays"]):
        assert models(*arguments)[0] == 2, arguments


def test_cached_weights_are_shown_checked_and_removed(models):
    assert "cached weights" not in models()[2]
    folder = cache_folder("weights")
    assert is_private(folder)
    first, second = (folder / f"{digit * 16}.weights" for digit in "ab")
    for path in (first, second):
        publish_sealed(path, encode_header({"name": path.name}), [bytes(100_000)])
    (folder / "notes.txt").write_bytes(b"mine")
    assert f"cached weights: 2 files, 331.2 KB, in {folder}\n" in models()[2]
    assert models("--check")[::2] == (0, "cached weights: 2 intact, 0 damaged\n")
    content = bytearray(second.read_bytes())
    content[-1000] ^= 4
    second.write_bytes(content)
    status, _, err = models("--check")
    assert (status, second.exists()) == (1, False)
    assert f"warning: {second} was damaged and has been removed\n" in err
    status, _, err = models("--clear-cache")
    assert (status, [path.name for path in folder.iterdir()]) == (0, ["notes.txt"])
    assert err.startswith("removed cached weights: 1 file")
    assert models("--clear-cache")[::2] == (0, "the cache is empty\n")


@pytest.mark.parametrize(
    ("arguments", "one", "other"),
    [
        (["--check", "--json"], "--check", "--json"),
        (["--json", "--clear-cache"], "--clear-cache", "--json"),
        (["--check", "--clear-cache"], "--clear-cache", "--check"),
        (["--check", "rm", "plays"], "--check", "rm"),
        (["--clear-cache", "rm", "plays"], "--clear-cache", "rm"),
        (["--json", "rm", "plays"], "--json", "rm"),
    ],
)
def test_options_that_exclude_each_other_are_named(models, arguments, one, other):
    message = f"error: {one} cannot be combined with {other}\nhint: remove one of them\n"
    assert models(*arguments)[::2] == (2, message)
    assert find_model("plays").path.exists()
