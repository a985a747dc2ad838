"""Removing a model touches nothing but the model."""

import json
import sys

import pytest

from support.models import make_model
from support.runs import RUN_JSON
from tgen.checkpoint import model_dir, model_files
from tgen.checkpoint.model_lookup import shipped_model
from tgen.errors import LockedError, UsageError
from tgen.runs.output_folder import lock_run
from tgen.runs.remove_model import remove_model


@pytest.fixture
def model(tokenizer, tmp_path):
    """Return a model with a training state, beside another file."""
    random = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    path = tmp_path / "models" / "plays"
    model_dir.save(path, random.config, tokenizer, random.to_arrays())
    (path / "training" / "state-00000001").mkdir(parents=True)
    (path / "training" / "run.json").write_text(RUN_JSON)
    (tmp_path / "models" / "other.txt").write_text("other")
    return path


def test_model_is_removed_with_its_training_state(model):
    assert remove_model(model) == []
    assert [path.name for path in model.parent.iterdir()] == ["other.txt"]


def test_files_that_are_not_the_models_stay(model):
    (model / "notes").mkdir()
    (model / "notes" / "config.json").write_text("{}")
    (model / "README.md").write_text("mine")
    assert remove_model(model) == ["README.md", "notes"]
    assert sorted(path.name for path in model.iterdir()) == ["README.md", "notes"]
    assert (model / "notes" / "config.json").exists()
    with pytest.raises(UsageError, match="is not a model"):
        remove_model(model)


def test_directory_named_training_without_a_run_stays(model):
    (model / "training" / "run.json").unlink()
    assert remove_model(model) == ["training"]
    assert (model / "training" / "state-00000001").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_links_are_removed_or_refused_but_not_followed(model, tmp_path):
    (tmp_path / "weights").write_bytes((model / "model.safetensors").read_bytes())
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "weights")
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(UsageError, match="is a link"):
        remove_model(tmp_path / "link")
    assert remove_model(model) == []
    assert (tmp_path / "weights").exists()


def test_directories_that_are_not_models_are_refused(model, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.json").write_text(json.dumps({"name": "something"}))
    for path in (project, tmp_path, model.parent, tmp_path / "missing", model / "config.json"):
        with pytest.raises(UsageError, match="is not a model"):
            remove_model(path)
    assert model.exists()
    assert (project / "config.json").exists()
    with pytest.raises(UsageError, match="shipped with tgen"):
        remove_model(shipped_model())


def test_run_without_weights_and_gguf_file_are_removed(model):
    for name in model_files.files_of_a_model(model):
        (model / name).unlink()
    assert remove_model(model) == []
    assert not model.exists()
    file = model.with_suffix(".gguf")
    file.write_bytes(b"GGUF and more")
    remove_model(file)
    assert not file.exists()


def test_model_in_training_is_refused(model):
    with lock_run(model), pytest.raises(LockedError, match="in use by process") as error:
        remove_model(model)
    assert "--out" not in error.value.hint
    assert (model / "config.json").exists()
    assert remove_model(model) == []
