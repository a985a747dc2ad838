"""Tokens that the kernels sample without Python between them are those of one pass at a time."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from support.models import DIFFERENT_POSITIONS, cpu_engine, make_model
from tgen.config import SamplingConfig
from tgen.engine.cpu import engine as engines
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.row_sampler import RowSampler
from tgen.errors import ModelError
from tgen.generation.loop import extract_prompt_cache, generate_requests, make_source
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.sequence import Request
from tgen.generation.vocabulary import Vocabulary
from tgen.reports.generation import Token

PIECES = Vocabulary([f"{i % 30},".encode() for i in range(300)], ends=[299])
SAMPLED = SamplingConfig(temperature=1.2, top_k=0, top_p=0.9, min_p=0.01, seed=5)


@pytest.fixture
def run(monkeypatch) -> Callable[..., tuple[list[Token], list[int]]]:
    """Return a function that generates one text, with continuations of up to `seconds`; it returns
    the tokens, and the numbers of tokens of all continuations."""

    def generate(engine, sampling, *, seconds=1e9, vocabulary=PIECES, drafts=None):
        counts = []

        def continue_text(self, *arguments, **how):
            sampled = original(self, *arguments, **how) if seconds else []
            counts.append(len(sampled))
            return sampled

        original = CpuEngine.continue_text
        with monkeypatch.context() as patch:
            patch.setattr(engines, "_CONTINUE_SECONDS", seconds)
            patch.setattr(CpuEngine, "continue_text", continue_text)
            source = make_source([Request([1, 2, 3], sampling, described=False)])
            tokens = generate_requests(
                engine, source, batch_size=1, vocabulary=vocabulary, drafts=drafts
            )
            return list(tokens), counts

    return generate


def make_engine(family="qwen3", *, n_threads=1, cache_dtype=None, dtype="float32", **values):
    model = make_model(family, **values)
    arrays = model.to_arrays()
    return cpu_engine(
        model.config, arrays, n_threads=n_threads, dtype=dtype, cache_dtype=cache_dtype
    )


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0), SAMPLED])
@pytest.mark.parametrize("family", DIFFERENT_POSITIONS)
def test_texts_are_the_same_past_the_context(run, family, sampling):
    sampling = replace(sampling, max_new_tokens=150)
    engine = make_engine(family, n_threads=2)
    expected, _ = run(engine, sampling, seconds=0)
    actual, counts = run(engine, sampling)
    assert actual == expected
    assert sum(counts) >= 100
    assert max(counts) > 20


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0), SAMPLED])
@pytest.mark.parametrize("cost", [0.0, 0.5])
def test_texts_with_drafts_are_continued_between_searches(run, sampling, cost):
    sampling = replace(sampling, max_new_tokens=600)
    engine = make_engine("qwen3", n_threads=2)
    expected, _ = run(engine, sampling, seconds=0)
    actual, counts = run(engine, sampling, drafts=NgramDrafter(search_cost=cost, pass_cost=cost))
    assert actual == expected
    if cost == 0:
        assert 1 < max(counts) <= 4
    elif sampling.temperature:  # a greedy text repeats itself, and so has drafts
        assert max(counts) == 16


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("int8", None), ("int4", "int8"), ("bfloat16", "float16")]
)
def test_texts_are_the_same_for_all_dtypes_and_long_contexts(run, dtype, cache_dtype):
    sampling = replace(SAMPLED, max_new_tokens=600)
    engine = make_engine(
        n_threads=2, dtype=dtype, cache_dtype=cache_dtype, context_length=700, d_model=64
    )
    vocabulary = Vocabulary()  # no end token
    expected, _ = run(engine, sampling, seconds=0, vocabulary=vocabulary)
    for seconds in (1e-4, 1e9):
        assert run(engine, sampling, seconds=seconds, vocabulary=vocabulary)[0] == expected
    assert len(expected) == 600


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": ("7,2",)},
        {"stop_token_ids": (17,)},
        {"overflow": "stop"},
        {"max_new_tokens": 5},
    ],
)
def test_a_text_that_ends_between_two_passes(run, changes):
    sampling = replace(SAMPLED, **{"max_new_tokens": 400} | changes)
    engine = make_engine(context_length=200)
    expected, _ = run(engine, sampling, seconds=0)
    actual, counts = run(engine, sampling)
    assert actual == expected
    assert actual[-1].finish
    assert sum(counts) >= len(actual) - 1
    texts = [extract_prompt_cache(engine, [1, 2, 3, *(token.id for token in actual)])]
    run(engine, sampling, seconds=0)
    texts.append(extract_prompt_cache(engine, [1, 2, 3, *(token.id for token in actual)]))
    ours, theirs = texts
    assert np.array_equal(ours.keys, theirs.keys)
    assert np.array_equal(ours.values, theirs.values)


@pytest.mark.parametrize(
    ("changes", "vocabulary"),
    [
        ({}, Vocabulary([b"x"] * 290)),  # ids without a token
        ({"repetition_penalty": 1.1}, PIECES),
        ({"typical_p": 0.9}, PIECES),
        ({"explain": True}, PIECES),
    ],
)
def test_settings_that_need_logits_in_python(run, changes, vocabulary):
    sampling = replace(SAMPLED, max_new_tokens=20, **changes)
    assert not any(run(make_engine(), sampling, vocabulary=vocabulary)[1])


def test_logits_that_are_not_finite_are_an_error(run):
    model = make_model("gpt2")
    arrays = {name: np.array(array) for name, array in model.to_arrays().items()}
    for array in arrays.values():
        if array.shape[:1] == (300,):
            array[7] = np.nan  # the embedding of one token: the pass after it fails
    engine = cpu_engine(model.config, arrays, n_threads=1)
    sampling = replace(SAMPLED, temperature=3.0, top_p=1.0, min_p=0.0, max_new_tokens=4000)
    with pytest.raises(ModelError, match="not finite"):
        run(engine, sampling)


def test_a_text_longer_than_the_context_is_refused():
    engine = make_engine(context_length=24)
    engine.extend([[1] * 20])
    with pytest.raises(ValueError, match="cannot append"):
        engine.continue_text(2, 5, SAMPLED, position=21)
    assert engine.lengths == [20]


def test_a_text_for_which_the_memory_is_refused_ends_alone(monkeypatch):
    engine, original, calls = make_engine(), CpuEngine.continue_text, []
    requests = [Request([1, 2, i], SAMPLED, described=False) for i in range(3)]
    vocabulary, errors = Vocabulary(), {}

    def refuse_once(self, *arguments, **how):
        calls.append(arguments)
        if len(calls) == 2:
            raise ModelError("no memory")
        return original(self, *arguments, **how)

    def run():
        source = make_source(requests)
        return list(
            generate_requests(
                engine, source, batch_size=1, vocabulary=vocabulary, on_error=errors.__setitem__
            )
        )

    expected = [token for token in run() if token.sequence]
    assert not errors
    monkeypatch.setattr(CpuEngine, "continue_text", refuse_once)
    assert [token for token in run() if token.sequence] == expected
    assert [*errors] == [0]


def test_another_thread_may_add_a_sequence_at_any_time(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(RowSampler, "accepts", lambda *_: engine.select([0, 0]) or True)
    assert engine.continue_text(1, 5, SAMPLED, position=1) == []
    assert engine.lengths == [0, 0]
