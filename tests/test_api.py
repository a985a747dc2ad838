"""The Python API: load, generate, stream, train."""

import warnings

import pytest

import tgen
from support.models import TEXT
from tgen.errors import TrainingError, UsageError
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


def test_stopped_run_resumes_from_python_to_the_same_weights(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(TEXT)
    shape = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_length": 16}
    options = {"steps": 6, "threads": 1, "seed": 3, **shape}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(tgen.train(corpus, out=whole, **options))
    stop = iter([False, False, True])
    list(tgen.train(corpus, out=parts, stopped=lambda: next(stop), **options))
    reports = list(tgen.train(out=parts, resume=True))
    assert reports[-1].step == 6
    weights = [(out / "model.safetensors").read_bytes() for out in (whole, parts)]
    assert weights[0] == weights[1]
    with pytest.raises(UsageError, match="size cannot be combined with resume"):
        tgen.train(out=parts, resume=True, size="nano")
    with pytest.raises(TrainingError, match="steps differs"):
        list(tgen.train(out=parts, resume=True, steps=7))
    assert list(tgen.train(out=parts, resume=True, override=True, steps=7))[-1].step == 7


def test_training_needs_a_corpus(tmp_path):
    with pytest.raises(UsageError, match="no corpus"):
        tgen.train(out=tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "1"}, "temperature: invalid value '1'"),
        ({"stop": 5}, "stop: invalid value 5"),
        ({"bias": {"a": "x"}}, "bias: invalid value 'x'"),
        ({"bias": [1]}, "bias: invalid value"),
        ({"samplers": 5}, "samplers: invalid value 5"),
        ({"json_schema": {"a": {1}}}, "json_schema: invalid value"),
        ({"regex": b"a"}, "regex: invalid value b'a'"),
        ({"grammar": b"start: A"}, "grammar: invalid value b'start: A'"),
        ({"until_newline": "no"}, "until_newline: invalid value 'no'"),
        ({"prompt_cache": "path"}, "prompt_cache: invalid value 'path'"),
        ({"prompt": 5}, "prompt: invalid value 5"),
    ],
)
def test_values_of_wrong_types_are_usage_errors(trained, options, message):
    with pytest.raises(UsageError, match=message) as error:
        tgen.load(trained).generate(**options)
    assert error.value.hint
    assert "--" not in error.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp16"},
        {"threads": -3},
        {"threads": 0},
        {"threads": 1025},
        {"threads": "2"},
        {"device": 5},
        {"path": 5},
    ],
)
def test_load_refuses_wrong_values(trained, options):
    (name,) = options
    with pytest.raises(UsageError, match=f"{name}: invalid value"):
        tgen.load(**{"path": trained, **options})


def test_misspelled_options_get_a_suggestion(trained, tmp_path):
    with pytest.raises(UsageError) as error:
        tgen.load(trained).generate("a", tempature=1)
    assert error.value.hint == "did you mean temperature?"
    with pytest.raises(UsageError) as error:
        tgen.train("corpus.txt", out=tmp_path, minuets=3)
    assert error.value.hint == "did you mean minutes?"


def test_train_takes_steps_or_minutes(tmp_path):
    with pytest.raises(UsageError, match="minutes cannot be combined with steps"):
        tgen.train("corpus.txt", out=tmp_path, minutes=1, steps=5)


@pytest.mark.parametrize("prompts", [None, 5, b"a", "a"])
def test_prompts_that_are_no_list_are_refused(trained, prompts):
    with pytest.raises(UsageError, match="prompts: invalid value") as error:
        tgen.load(trained).generate_batch(prompts)
    assert error.value.hint == "set prompts to a list of texts"


@pytest.mark.parametrize(
    ("corpus", "options", "message"),
    [
        (5, {}, "corpus: invalid value 5"),
        (b"c.txt", {}, "corpus: invalid value b'c.txt'"),
        (["c.txt", 5], {}, "corpus: invalid value 5"),
        ("c.txt", {"out": 5}, "out: invalid value 5"),
        ("c.txt", {"out": ""}, "out: invalid value ''"),
        ("c.txt", {"threads": 1025}, "threads: invalid value 1025"),
    ],
)
def test_train_refuses_wrong_values(tmp_path, corpus, options, message):
    with pytest.raises(UsageError) as error:
        tgen.train(corpus, **{"out": tmp_path / "model", **options})
    assert error.value.message == message
    assert error.value.hint


def test_cache_of_another_prompt_is_warned_about(trained):
    model = tgen.load(trained, threads=1)
    cache = model.cache_prompt("What is")
    with pytest.warns(UserWarning, match="prompt_cache is not used.*starts differently"):
        text = model.generate("king", prompt_cache=cache, **OPTIONS)
    assert text == model.generate("king", **OPTIONS)
    with pytest.warns(UserWarning, match="prompt_cache is not used.*longer than the context"):
        model.generate("What is" * 100, prompt_cache=cache, max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate("What was", prompt_cache=cache, max_new_tokens=1)
