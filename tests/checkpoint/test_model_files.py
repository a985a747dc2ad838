"""The files that belong to a model."""

from pathlib import Path

from support.models import make_model
from tgen.checkpoint import model_dir, model_files


def test_files_of_a_model_and_of_its_run_are_not_for_output(tokenizer, tmp_path):
    folder, model = tmp_path / "m", make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(folder, model.config, tokenizer, model.to_arrays())
    names = ["config.json", "tokenizer.json", "model.safetensors", "new.safetensors", "vocab.json"]
    (folder / "training").mkdir()
    (folder / "training" / "run.json").touch()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "link.csv").symlink_to(folder / "config.json")
    kept = [folder / name for name in [*names, "training/run.json"]]
    for path in [*kept, tmp_path / "model.gguf", tmp_path / "link.csv"]:
        assert model_files.belongs_to_a_model(path)
    (tmp_path / "results").mkdir()
    free = [folder / "page.html", folder / "bench.json", tmp_path / "results" / "config.json"]
    for path in [*free, tmp_path / "new.gguf", folder, Path("/dev/null")]:
        assert not model_files.belongs_to_a_model(path)
