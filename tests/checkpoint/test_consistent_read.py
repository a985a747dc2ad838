"""A model that is replaced while it is read: the reader sees one of the two."""

import numpy as np
import pytest

from support.models import make_model
from tgen.checkpoint import model_dir
from tgen.errors import ModelError
from tgen.tokenizer import train_char


def test_a_reader_sees_the_old_model_or_the_new_one(tmp_path, monkeypatch):
    tokenizers = [train_char([text.encode()]) for text in ("é", "ü")]
    models = [make_model("llama", seed=n, vocab_size=tokenizers[0].vocab_size) for n in (0, 1)]
    read, n_replaced, most = model_dir._read_weights, [0], [0]

    def save(n: int) -> None:
        model_dir.save(tmp_path / "m", models[n].config, tokenizers[n], models[n].to_arrays())

    def replaced_before(*given):
        if n_replaced[0] < most[0]:
            n_replaced[0] += 1
            save(n_replaced[0] % 2)
        return read(*given)

    save(0)
    monkeypatch.setattr(model_dir, "_read_weights", replaced_before)
    for times in (1, 2):
        most[0] = times
        found = model_dir.load(tmp_path / "m")
        (n,) = [n for n in (0, 1) if found.tokenizer.json == tokenizers[n].json]
        wanted = models[n].to_arrays()
        assert all(np.array_equal(found.arrays[name], wanted[name]) for name in wanted)
    most[0] = 1_000
    with pytest.raises(ModelError, match="changes while it is read"):
        model_dir.load(tmp_path / "m")


def test_a_model_that_comes_back_while_it_is_read_is_found(tmp_path, monkeypatch):
    tokenizer = train_char([b"abcd"])
    model = make_model("llama", vocab_size=tokenizer.vocab_size)
    path = tmp_path / "m"
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    read, away = model_dir._read_weights, [True]

    def gone_for_a_moment(*given):
        if away.pop():
            away.append(False)
            content = (path / "config.json").read_bytes()
            (path / "config.json").unlink()
            (path / "config.json").write_bytes(content)
            raise ModelError("another model's weights")
        away.append(False)
        return read(*given)

    monkeypatch.setattr(model_dir, "_read_weights", gone_for_a_moment)
    assert model_dir.load(path).config == model.config
