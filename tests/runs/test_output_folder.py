"""A corpus skips models and runs, so that training in a folder leaves its corpus as it was."""

import os
import shutil
from pathlib import Path

import pytest

from support.adapters import save_adapter
from support.models import TEXT, make_model
from support.runs import request, start_run
from tgen import corpus, runs
from tgen.checkpoint import model_card, model_dir
from tgen.cli.app import run
from tgen.errors import CorpusError, UsageError
from tgen.runs import output_folder, saved_state
from tgen.runs.output_folder import check_out_is_free, lock_run, own_files
from tgen.storage.files import output_problem

TYPED = {"config.json": '{"model_type": "opt"}', "vocab.json": "{}", "README.md": "A model."}
FOREIGN = {"app/config.json": '{"port": 80}', "app/model.txt": "x", "notes/training/run.json": "{}"}


def read(*paths):
    return corpus.read([str(path) for path in paths], own_files=own_files)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts, some of which have the names of a model's or a run's files."""
    monkeypatch.chdir(tmp_path)
    for name, content in {"corpus.txt": TEXT.decode(), "more/a.txt": "and more", **FOREIGN}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    return tmp_path


def make_all(folder, tokenizer):
    """Leave everything that tgen and transformers write."""
    list(runs.start(request(folder, "models/run", tensorboard=True)))
    start_run(request(folder, "models/stopped"))
    shutil.copytree("models/stopped", "models/killed")
    for name in ("run.json", "log.jsonl"):
        Path("models/killed/training", name).unlink()
    Path("models/killed/training/LOCK").write_text("123")
    random = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(Path("deep/er/model"), random.config, tokenizer, random.to_arrays())
    save_adapter(Path("models/adapter"), Path("deep/er/model"))
    for name, content in TYPED.items():
        Path("pickles").mkdir(exist_ok=True)
        (Path("pickles") / name).write_text(content)
    Path("pickles/pytorch_model.bin").write_bytes(b"PK\0")
    export = ["export", "deep/er/model", "--to"]
    assert run([*export, "transformers", "--out", "shards", "--max-shard-size", "20KB"]) == 0
    assert run([*export, "gguf"]) == 0
    cache = ["--save-cache", "cache.safetensors", "-n", "1", "-p", "The king"]
    assert run(["generate", "-m", "deep/er/model", *cache]) == 0


@pytest.mark.usefixtures("folder")
def test_broken_link_is_no_directory_for_a_model():
    Path("link").symlink_to("gone")
    with pytest.raises(UsageError, match="--out link is a broken link"):
        check_out_is_free(Path("link"), overwrite=False)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("edited", [False, True])
def test_a_model_named_as_the_corpus_has_no_text_of_its_own(edited, tokenizer):
    random = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(Path("model"), random.config, tokenizer, random.to_arrays())
    model_card.save(Path("model"), "# Model\n")
    if edited:
        Path("model/README.md").write_text("My words.")
        assert read("model").n_bytes == len("My words.")
        return
    with pytest.raises(CorpusError, match="'model' has no text: skipped 1 model or run"):
        read("model")


PATTERNS = [".", "**/*", "*", "m*/**", "./[bm]*/*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_training_in_a_folder_leaves_its_corpus_as_it_was(pattern, folder, tokenizer):
    before = read(pattern)
    assert not before.notes
    make_all(folder, tokenizer)
    after = read(pattern)
    assert after.sha256 == before.sha256
    if pattern == ".":
        note = after.notes[-1]
        names = ["deep/er/model", "models/adapter", "models/run", "models/stopped", "pickles"]
        assert all(name in note for name in [*names, "models/killed", "shards"])
        files = " ".join(after.notes)
        assert "model-f32.gguf" in files
        assert "cache.safetensors" in files


def test_texts_beside_the_files_of_a_model_are_read_if_its_directory_is_named(folder, tokenizer):
    random = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(Path("more"), random.config, tokenizer, random.to_arrays())
    for name in ("more", "more/*", "./more", str(folder / "more")):
        text = read(name)
        assert text.n_bytes == len("and more")
        directory = Path(name.removesuffix("/*"))
        assert text.notes == [f"skipped 1 model or run in the corpus: {directory}"]
    assert read("more/config.json").n_bytes  # what is named itself is read


@pytest.mark.usefixtures("folder")
def test_run_does_not_read_its_own_lock():
    before = read(".")
    with lock_run(Path("models/new")):
        assert (read(".").sha256, read(".").notes) == (before.sha256, [])


def test_training_directory_of_a_run_is_no_text(folder):
    list(runs.start(request(folder, "run")))
    for name in ("run/training", "run/training/*", "run/*/*"):
        with pytest.raises(CorpusError, match="has no text: skipped"):
            read(name)


@pytest.mark.usefixtures("folder")
def test_directory_that_cannot_be_read_is_an_error(monkeypatch):
    scandir = os.scandir

    def fail(path):
        if Path(path).name == "more":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(CorpusError, match=r"cannot read \./more: Perm"):
        read(".")


@pytest.mark.usefixtures("folder")
def test_second_run_in_a_folder_trains_on_the_text_of_the_first():
    command = ["train", ".", "--set", "d_model=16", "--set", "n_layers=1", "--steps", "2", "-q"]
    assert run([*command, "--out", "models/a"]) == 0
    assert run([*command, "--out", "models/b"]) == 0
    assert run([*command, "--out", "models/a", "--overwrite"]) == 0
    assert run(["train", ".", "--resume", "--out", "models/b", "-q"]) == 0
    digests = {saved_state.load_record(Path("models", n))[0]["corpus_sha256"] for n in "ab"}
    assert len(digests) == 1


def test_directory_that_another_start_makes_meanwhile_is_free(tmp_path, monkeypatch):
    def find_problem(out: Path) -> str:
        out.mkdir()
        return output_problem(out)

    monkeypatch.setattr(output_folder, "output_problem", find_problem)
    check_out_is_free(tmp_path / "new", overwrite=False)
