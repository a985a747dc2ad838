"""Model cards: what a run writes, that an edited one stays, and what exports take from it."""

import json
from pathlib import Path

import gguf
import pytest
from huggingface_hub import ModelCard

from support.runs import request
from tgen import runs
from tgen.checkpoint import model_card
from tgen.cli.app import run
from tgen.config.training import TrainConfig

SHORT = {"train": TrainConfig(steps=2), "overrides": {"eval_every": "2"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A trained directory whose card names a license."""
    folder = tmp_path_factory.mktemp("base")
    paths = [f"{folder}/lang=en/c.txt", f"--general={folder}/a=b/g.txt", f"-o{folder}/base"]
    paths += [f"file://{folder}/d.txt", f"general={folder}/h.txt", "-m~/i", "lang=en/j.txt"]
    command = ["train", str(folder / "corpus.txt"), "--steps", "2", *paths]
    list(runs.start(request(folder, "base", command=command, **SHORT)))
    return folder / "base"


def copy_files(model, folder):
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())


def data_of(folder):
    return ModelCard((folder / "README.md").read_text()).data.to_dict()


def test_a_run_writes_a_card_without_absolute_paths(base):
    text = (base / "README.md").read_text()
    assert model_card.is_unedited(base)
    assert data_of(base) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tgen"],
    }
    assert str(base.parent) not in text
    command = "tgen train corpus.txt --steps 2 c.txt --general=g.txt -obase file:d.txt"
    assert f"{command} general=h.txt -mi lang=en/j.txt\n" in text
    for part in (
        "# base\n",
        "`corpus.txt`: ",
        "- Held-out text: ",
        "- Memorization: ",
        "| batch |",
    ):
        assert part in text
    assert json.loads((base / "tokenizer_config.json").read_text())["padding_side"] == "left"


def test_an_edited_card_survives_everything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    list(runs.start(request(tmp_path, **SHORT)))
    card, exported = tmp_path / "model" / "README.md", tmp_path / "exported"
    mine = card.read_text().replace("---\n", "---\nlicense: cc-by-4.0\n", 1)
    list(runs.start(request(tmp_path, overwrite=True, **SHORT)))  # replaces its own
    assert model_card.is_unedited(card.parent)
    card.write_text(mine)
    list(runs.start(request(tmp_path, overwrite=True, **SHORT)))
    assert card.read_text() == mine
    export = ["export", "model", "--to", "transformers", "--out", "exported", "--quiet"]
    assert run(export) == 0
    assert (exported / "README.md").read_text() == mine
    (exported / "README.md").write_text("mine\n")
    assert run([*export, "--overwrite"]) == 0
    assert (exported / "README.md").read_text() == "mine\n"
    assert run(["models", "rm", "model", "--yes"]) == 0
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["README.md"]
    list(runs.start(request(tmp_path, "other", **SHORT)))
    assert run(["models", "rm", "other", "--yes"]) == 0
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("mine", ["für Größe\n".encode("cp1252"), b"mine\n" * (1 << 18), b""])
def test_readme_of_any_bytes_stays(base, tmp_path, monkeypatch, mine):
    monkeypatch.chdir(tmp_path)
    copy_files(base, tmp_path / "model")
    readme = tmp_path / "model" / "README.md"
    replaced = readme.read_text().replace("# base", "# \ufffd")
    model_card.save(tmp_path / "model", replaced)
    assert model_card.is_unedited(tmp_path / "model")
    readme.write_bytes(readme.read_bytes().replace("\ufffd".encode(), b"\xfc"))
    assert not model_card.is_unedited(tmp_path / "model")
    export = ["export", "model", "--to", "transformers", "--out", "exported", "--quiet"]
    assert run(export) == 0
    assert (tmp_path / "exported" / "README.md").read_bytes() == readme.read_bytes()
    (tmp_path / "exported" / "README.md").write_bytes(mine)
    assert run([*export, "--overwrite"]) == 0
    assert (tmp_path / "exported" / "README.md").read_bytes() == mine
    readme.write_bytes(mine)
    list(runs.start(request(tmp_path, overwrite=True, **SHORT)))
    assert readme.read_bytes() == mine
    assert run(["models", "rm", "model", "--yes"]) == 0
    assert readme.read_bytes() == mine


def test_an_exported_model_without_a_card_gets_one(base, tmp_path, monkeypatch):
    copy_files(base, tmp_path / "bare")
    (tmp_path / "bare" / "README.md").unlink()
    monkeypatch.chdir(tmp_path / "bare")
    assert run(["export", ".", "--to", "transformers", "--out", "../out", "--quiet"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "\n# out\n" in text
    assert " M parameters), exported by tgen " in text
    assert "Not stated. It depends on `bare`: add `license:`" in text
    assert model_card.is_unedited(tmp_path / "out")


def test_fine_tuned_models_adapters_and_gguf_files_inherit_the_license(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy_files(base, tmp_path / "base")
    card = tmp_path / "base" / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1))
    lora = {"overrides": {}, "train": TrainConfig(steps=2, lora=2)}
    shape = dict.fromkeys(("d_model", "n_layers", "n_heads", "context_length"))
    lora = lora | {"overrides": {**shape, "dropout": None}, "start_from": tmp_path / "base"}
    list(runs.start(request(tmp_path, "adapter", **lora)))
    assert data_of(tmp_path / "adapter") == {
        "library_name": "peft",
        "license": "apache-2.0",
        "base_model": "base",
        "pipeline_tag": "text-generation",
        "tags": ["tgen", "lora"],
    }
    assert "Inherited from `base`: apache-2.0." in (tmp_path / "adapter" / "README.md").read_text()
    export = ["export", "adapter", "--merge", "--quiet", "--to"]
    assert run([*export, "transformers", "--out", "merged"]) == 0
    assert data_of(Path("merged"))["library_name"] == "transformers"
    assert model_card.is_unedited(Path("merged"))
    assert run([*export, "gguf", "--out", "merged.gguf"]) == 0
    fields = gguf.GGUFReader("merged.gguf").fields
    values = {name: field.contents() for name, field in fields.items() if "general" in name}
    assert values["general.license"] == "apache-2.0"
    assert values["general.base_model.0.name"] == "base"
    assert values["general.base_model.count"] == 1
    assert "tgen" in values["general.description"]
    assert run(["export", "merged.gguf", "--to", "gguf", "--out", "again.gguf", "--quiet"]) == 0
    again = gguf.GGUFReader("again.gguf").fields
    assert again["general.license"].contents() == "apache-2.0"
    assert run(["export", "merged.gguf", "--to", "transformers", "--out", "plain", "-q"]) == 0
    assert data_of(Path("plain")) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "base_model": "base",
        "pipeline_tag": "text-generation",
        "tags": ["tgen"],
    }
    text = Path("plain/README.md").read_text()
    assert "from `merged.gguf`.\n" in text
    assert text.count("Inherited from `merged.gguf`: apache-2.0.\n") == 1
    assert str(tmp_path) not in text
    full = lora | {"train": TrainConfig(steps=2), "start_from": tmp_path / "merged.gguf"}
    list(runs.start(request(tmp_path, "full", **full)))
    assert data_of(tmp_path / "full")["license"] == "apache-2.0"
    text = (tmp_path / "full" / "README.md").read_text()
    assert "Inherited from `merged.gguf`: apache-2.0." in text
