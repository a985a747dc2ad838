"""The Python API: load, generate, stream, train."""

import pytest

import tgen
from support.models import TEXT
from tgen.errors import UsageError
from tgen.reports.training import DoneReport, PlanReport

OPTIONS = {"max_new_tokens": 20, "seed": 3}


def test_streamed_pieces_are_the_generated_text(trained):
    model = tgen.load(trained, threads=1)
    pieces = list(model.stream("What is", **OPTIONS))
    assert len(pieces) > 1
    assert "".join(pieces) == model.generate("What is", **OPTIONS)
    assert model.path == trained
    assert model.config.d_model == 32


def test_a_cached_prompt_gives_the_same_text(trained, tmp_path):
    model = tgen.load(str(trained), threads=1)
    expected = model.generate("What is", **OPTIONS)
    model.save_cache(tmp_path / "prompt.cache", model.cache_prompt("What"))
    cache = model.load_cache(tmp_path / "prompt.cache")
    assert model.generate("What is", prompt_cache=cache, **OPTIONS) == expected


def test_unknown_options_are_refused_by_name(trained, tmp_path):
    with pytest.raises(UsageError, match="unknown option tempature"):
        tgen.load(trained).generate("a", tempature=1)
    with pytest.raises(UsageError, match="unknown option widht"):
        tgen.train("corpus.txt", out=tmp_path, widht=3)


def test_the_old_spelling_of_dtype_warns_and_works(trained):
    with pytest.warns(DeprecationWarning, match="dtype"):
        old = tgen.load(trained, weights="int8", threads=1)
    new = tgen.load(trained, dtype="int8", threads=1)
    assert old.generate("a", **OPTIONS) == new.generate("a", **OPTIONS)


def test_train_yields_reports_and_writes_a_model(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(TEXT)
    shape = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_length": 16}
    reports = list(tgen.train(corpus, out=tmp_path / "model", steps=4, threads=1, **shape))
    plans = [report for report in reports if isinstance(report, PlanReport)]
    assert [plan.steps for plan in plans] == [4]
    assert isinstance([r for r in reports if isinstance(r, DoneReport)][-1], DoneReport)
    model = tgen.load(tmp_path / "model")
    assert model.config.d_model == 16
    assert isinstance(model.generate("a", max_new_tokens=3), str)
