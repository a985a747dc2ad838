"""The Python API: load, generate, stream, train."""

import copy
import gc
import json
import pickle
import shutil
import warnings
import weakref
from dataclasses import fields
from operator import methodcaller

import numpy as np
import pytest

import tgen
from support.adapters import save_adapter
from support.models import TEXT
from tgen.checkpoint import model_dir
from tgen.config.option import flag_values, replace_flags
from tgen.errors import ModelError, TgenError, TrainingError, UsageError
from tgen.reports.generation import TextDetails
from tgen.reports.training import DoneReport, PlanReport
from tgen.runs import RunRequest

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


def test_model_loaded_by_a_relative_path_works_in_another_directory(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text('{"do_sample": false}')
    monkeypatch.chdir(tmp_path)
    expected = tgen.load("model", threads=1).generate("What is")
    model = tgen.load("model", threads=1)
    monkeypatch.chdir("/")
    assert model.generate("What is") == expected
    assert model.weights().keys() == tgen.load(trained).weights().keys()
    model.save_cache(tmp_path / "prompt.cache", model.cache_prompt("What"))
    assert model.inspect("What is", view="tokens").data["tokens"]
    assert str(model.path) == "model"
    assert "'model'" in repr(model)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("text", lambda model: model.activations("a\ud800")),
        ("text", lambda model: model.score("a\ud800")),
        ("text", lambda model: model.inspect("a\ud800", view="tokens")),
        ("target", lambda model: model.inspect("a b", view="why", target="\ud800")),
        ("patch", lambda model: model.inspect("a b", view="patch", patch="\ud800")),
    ],
)
def test_unpaired_surrogates_are_refused_by_name(trained, field, call):
    with pytest.raises(UsageError, match=f"^{field} contains an unpaired surrogate"):
        call(tgen.load(trained, threads=1))


def test_whole_numbers_may_be_numpys_but_not_booleans(trained):
    model = tgen.load(trained, threads=1)
    texts = model.generate_batch(["a", "b"], batch_size=np.int64(1), **OPTIONS)
    assert texts == model.generate_batch(["a", "b"], batch_size=1, **OPTIONS)
    assert model.score("What is", stride=np.int32(4)) == model.score("What is", stride=4)
    with pytest.raises(UsageError, match="batch_size: invalid value True"):
        model.generate_batch(["a"], batch_size=True)


def test_stopped_must_be_a_function(tmp_path):
    with pytest.raises(UsageError, match="stopped: invalid value 5"):
        tgen.train("corpus.txt", out=tmp_path, steps=1, stopped=5)


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


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_warnings_name_the_line_of_the_caller(trained, method):
    model = tgen.load(trained, threads=1)
    cache = model.cache_prompt("What is")
    with pytest.warns(UserWarning, match="prompt_cache") as caught:
        getattr(model, method)("king", prompt_cache=cache, max_new_tokens=1)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.fixture
def other_weights(trained, tmp_path):
    """Return a model of the same shape with other weights."""
    bundle = model_dir.load(trained)
    arrays = {name: -array for name, array in bundle.arrays.items()}
    model_dir.save(tmp_path / "other", bundle.config, bundle.tokenizer, arrays)
    return tmp_path / "other"


@pytest.mark.parametrize("difference", ["weights", "replaced", "dtype", "cache_dtype", "adapter"])
def test_prompt_cache_of_another_model_is_refused(trained, other_weights, tmp_path, difference):
    options = {"path": shutil.copytree(trained, tmp_path / "mine"), "threads": 1}
    model = tgen.load(**options)
    cache = model.cache_prompt("What is")
    if difference == "weights":
        options["path"] = other_weights
    elif difference == "replaced":
        shutil.copy(other_weights / "model.safetensors", options["path"])
    elif difference == "adapter":
        options["adapter"] = save_adapter(tmp_path / "adapter", options["path"])
    else:
        options[difference] = {"dtype": "int8", "cache_dtype": "int8"}[difference]
    other = tgen.load(**options)
    for use in (
        methodcaller("generate", "What is", prompt_cache=cache),
        methodcaller("stream", "What is", prompt_cache=cache),
        methodcaller("save_cache", tmp_path / "prompt.cache", cache),
    ):
        with pytest.raises(
            ModelError, match=r"the prompt cache (belongs to|was computed)"
        ) as error:
            use(other)
        assert "cache_prompt" in error.value.hint
    assert not (tmp_path / "prompt.cache").exists()
    own = other.cache_prompt("What is")
    expected = other.generate("What is", **OPTIONS)
    assert other.generate("What is", prompt_cache=own, **OPTIONS) == expected


def test_prompt_cache_serves_every_load_of_its_model_and_no_other_shape(trained):
    cache = tgen.load(trained, threads=1).cache_prompt("What is")
    model = tgen.load(trained, threads=1)
    cache = pickle.loads(pickle.dumps(cache))
    assert repr(cache) == f"PromptCache({len(cache.tokens)} tokens)"
    for path in (5, None, ""):
        with pytest.raises(UsageError, match="path"):
            model.load_cache(path)
        with pytest.raises(UsageError, match="path"):
            model.save_cache(path, cache)
    with pytest.raises(UsageError, match=r"^path \S+: is a directory") as error:
        model.save_cache(trained, cache)
    assert error.value.hint == "name another file"
    expected = model.generate("What is", **OPTIONS)
    assert model.generate("What is", prompt_cache=cache, **OPTIONS) == expected
    for changed in (
        cache._replace(tokens=cache.tokens[:-1]),
        cache._replace(keys=cache.keys[:1]),
        cache._replace(values=cache.values[:, :, :, :-1]),
    ):
        with pytest.raises(ModelError, match="the prompt cache does not fit its model"):
            model.generate("What is", prompt_cache=changed)
    with pytest.raises(ModelError, match="does not name its model"):
        model.generate("What is", prompt_cache=cache._replace(model=None))


def details_of(text):
    return {name: getattr(text, name) for name in TextDetails.__annotations__}


@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 3}, {"logprobs": True, "explain": True}, {"stop": "e"}, {"overflow": "stop"}],
)
def test_texts_and_streams_have_the_details_of_their_tokens(trained, options):
    model = tgen.load(trained, threads=1)
    prompts = ["What is", "king"]
    options = {"max_new_tokens": 40, "seed": 3, **options}
    texts = model.generate_batch(prompts, **options)
    sampling = model._loaded.sampling(options | {"logprobs": int(options.get("logprobs", 0))})
    tokens = [[], []]
    for token in model._loaded.tokens([*map(model.encode, prompts)], sampling=sampling):
        tokens[token.sequence].append(token)
    for prompt, text, own in zip(prompts, texts, tokens, strict=True):
        alone = {**options, "seed": text.seed}
        stream = model.stream(prompt, **alone)
        assert (stream.finish_reason, stream.complete, stream.tokens) == (None, False, [])
        assert text == "".join(stream) == model.generate(prompt, **alone)
        assert details_of(text) == details_of(stream) == details_of(model.generate(prompt, **alone))
        assert text.tokens == [token.id for token in own]
        assert (text.finish_reason, text.complete) == (own[-1].finish, True)
        asked, n = "logprobs" in options, options.get("logprobs", 0)
        assert text.logprobs == ([token.logprob for token in own] if asked else None)
        assert [*map(len, text.top_logprobs or [])] == [n] * len(own) * asked
        explained = [token._replace(sequence=0) for token in own]
        assert text.explanations == (explained if "explain" in options else None)


def test_a_text_behaves_as_a_str(trained):
    text = tgen.load(trained, threads=1).generate("What is", logprobs=2, **OPTIONS)
    plain = str(text)
    assert isinstance(text, str)
    assert type(plain) is type(text + "") is type(text.strip()) is str
    assert (text, repr(text), hash(text)) == (plain, repr(plain), hash(plain))
    assert json.loads(json.dumps({text: text})) == {plain: plain}
    for same in (pickle.loads(pickle.dumps(text)), copy.copy(text), copy.deepcopy(text)):
        assert (same, details_of(same)) == (plain, details_of(text))


@pytest.mark.parametrize(
    "constraint",
    [{"json_schema": {"type": "string", "minLength": 500}}, {"regex": "a{50}"}],
)
def test_a_cut_text_is_not_complete(trained, constraint):
    model = tgen.load(trained, threads=1)
    for n in (0, 5):
        text = model.generate("x", max_new_tokens=n, **constraint)
        stream = model.stream("x", max_new_tokens=n, **constraint)
        assert (text.finish_reason, text.complete) == ("length", False)
        assert (list(stream) == [], stream.complete) == (text == "", False)
    assert model.generate("x", regex="ab?", max_new_tokens=20).complete
    assert model.generate("x", max_new_tokens=0).complete


def test_prompts_may_be_token_ids(trained):
    model = tgen.load(trained, threads=1)
    ids = model.encode("What is")
    expected = model.generate("What is", **OPTIONS)
    cache = model.cache_prompt(ids)
    for prompt in (ids, tuple(ids), np.array(ids), [*map(np.int32, ids)]):
        assert model.generate(prompt, **OPTIONS) == expected
        assert "".join(model.stream(prompt, prompt_cache=cache, **OPTIONS)) == expected
    assert model.generate_batch([ids, "king"], **OPTIONS)[0] == expected


@pytest.mark.parametrize(
    "prompt", [[], [-1], [300], [2**70], [True], [1.0], ["a"], [[1]], {1}, bytearray(b"a"), None]
)
def test_prompts_that_are_not_ids_are_refused(trained, prompt):
    model = tgen.load(trained, threads=1)
    assert model.config.vocab_size == 300
    for use in (
        model.generate,
        model.stream,
        model.cache_prompt,
        lambda p: model.generate_batch([p]),
    ):
        with pytest.raises(UsageError, match="prompt: invalid value") as error:
            use(prompt)
        assert "token id from 0 to 299" in error.value.hint


def test_unk_needs_a_tokenizer_of_words(tmp_path):
    (corpus := tmp_path / "corpus.txt").write_bytes(TEXT)
    with pytest.raises(UsageError, match="unk needs tokenizer=word"):
        tgen.train(corpus, out=tmp_path / "m", unk=True)
    tgen.train(corpus, out=tmp_path / "m", unk=True, tokenizer="word")  # no error


def test_errors_name_keywords_instead_of_flags(trained, tmp_path):
    model = tgen.load(trained, threads=1)
    model.save_cache(tmp_path / "cache", model.cache_prompt("a"))
    (tmp_path / "empty").mkdir()
    unfinished = shutil.copytree(trained, tmp_path / "unfinished")
    (unfinished / "model.safetensors").unlink()
    adapter = save_adapter(tmp_path / "adapter", trained)
    (corpus := tmp_path / "corpus.txt").write_bytes(TEXT)
    user = [{"role": "user", "content": "a"}]
    hints = []
    for use in (
        lambda: model.generate("a" * 99, overflow="stop"),
        lambda: model.generate("a", max_new_tokens=99, overflow="error"),
        lambda: model.generate("a", require=["king"], max_new_tokens=1),
        lambda: model.chat(user),
        lambda: model.inspect("a" * 99),
        lambda: tgen.load(trained, dtype="int8").load_cache(tmp_path / "cache"),
        lambda: tgen.load(trained, cache_dtype="float16").load_cache(tmp_path / "cache"),
        lambda: tgen.load(trained, device="mps"),
        lambda: tgen.load(tmp_path / "empty"),
        lambda: tgen.load(unfinished),
        lambda: tgen.load(trained, adapter=trained),
        lambda: tgen.load(adapter, adapter=adapter),
        lambda: list(tgen.train(corpus, out=tmp_path / "new", chat=True)),
        lambda: list(tgen.train(corpus, out=tmp_path / "new", template="x")),
        lambda: list(tgen.train(corpus, out=trained)),
        lambda: list(tgen.train(corpus, out=tmp_path / "new", resume=True)),
        lambda: list(tgen.train(out=trained, resume=True, steps=31)),
    ):
        with pytest.raises(TgenError) as error:
            use()
        text = error.value.message + error.value.hint
        assert "--" not in text.replace(str(tmp_path), "")
        assert error.value.__notes__ == [f"hint: {error.value.hint}"]
        hints.append(error.value.hint)
    assert hints[0] == 'shorten the prompt, or add overflow="slide"'
    assert hints[1] == 'use max_new_tokens=32 or less, or add overflow="slide"'
    assert hints[3] == "choose a model with a chat template, or call generate"
    assert hints[4] == "shorten the text, or add tail=True to inspect its last tokens"
    assert f'`tgen.train(resume=True, out="{unfinished}")`' in hints[9]


@pytest.mark.parametrize("config", [tgen.SamplingConfig, tgen.TrainConfig, RunRequest])
def test_every_flag_has_its_keyword(config):
    flags = flag_values(config)
    for one in fields(config):
        for flag in (part for pair in one.metadata.get("flags", ()) for part in pair.split("/")):
            text = f"remove {flag}, or add {flag} 5, or run `x {flag} N`; more {flag}"
            named = replace_flags(text, flags, "{}={}".format)
            assert flag not in named.replace(f"{one.name}=", "")
            assert named.count(one.name) == 4
    kept = "run torchrun --nproc-per-node N, 'a --seed' or a--seed or --seeds"
    assert replace_flags(kept, flags, "{}={}".format) == kept


def test_a_closed_model_frees_its_weights(trained):
    with tgen.load(trained, threads=1) as model:
        assert str(trained) in repr(model)
        assert "float32" in repr(model)
        text = model.generate("What is", **OPTIONS)
        stream = model.stream("What is", **OPTIONS)
        first = next(stream)
        engine = weakref.ref(model._loaded.engine)
    assert first + "".join(stream) == text
    del stream
    gc.collect()
    assert engine() is None
    assert repr(model) == "<tgen.Model, closed>"
    model.close()
    for use in (model.generate, model.stream, lambda: model.path, lambda: model.encode("a")):
        with pytest.raises(UsageError, match="the model is closed"):
            use()


def test_a_model_is_neither_pickled_nor_copied(trained):
    model = tgen.load(trained, threads=1)
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Model cannot be pickled.*tgen\.load"):
            use(model)


def test_public_names_are_listed():
    assert set(tgen.__all__) <= set(dir(tgen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "nano"}, "start_from cannot be combined with size"),
        ({"family": "gpt2"}, "start_from cannot be combined with family"),
        ({"vocab_size": 300}, "start_from cannot be combined with vocab_size"),
        ({"tokenizer": "char"}, "start_from cannot be combined with tokenizer"),
        ({"start_from": None, "general": "c.txt"}, "general needs start_from or adapter"),
        ({"lora": 2, "resume": True}, "lora cannot be combined with resume"),
        ({"n_ranks": 3}, "unknown option n_ranks"),
        ({"train": 3}, "unknown option train"),
    ],
)
def test_train_refuses_options_without_effect(trained, tmp_path, options, message):
    (tmp_path / "c.txt").write_bytes(TEXT)
    with pytest.raises(UsageError) as error:
        tgen.train(tmp_path / "c.txt", **{"out": tmp_path / "m", "start_from": trained, **options})
    assert error.value.message == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_from": "a", "size": "nano"}, "start_from cannot be combined with size"),
        ({"lora": 2}, "lora needs start_from"),
        ({"general": "a.txt"}, "general needs start_from or adapter"),
        ({"train": 5}, "unknown option train"),
    ],
)
def test_train_refuses_options_that_cannot_be_combined(tmp_path, options, message):
    with pytest.raises(UsageError) as error:
        tgen.train("corpus.txt", out=tmp_path / "model", **options)
    assert error.value.message == message
    assert error.value.hint
