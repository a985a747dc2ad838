"""The generation loop: the same text however it is computed."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command import tgen
from support.models import DIFFERENT_POSITIONS, make_model
from tgen.config import SamplingConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.generation.loop import generate, generate_requests, make_source
from tgen.generation.sequence import Request, check_request, window_start
from tgen.generation.truncation import softmax
from tgen.generation.vocabulary import Vocabulary
from tgen.python_api import load

GREEDY = SamplingConfig(temperature=0)


def texts(engine, prompts, n, *, sampling=GREEDY, stop=(), kv_cache=True):
    out = [[] for _ in prompts]
    sampling = replace(sampling, max_new_tokens=n)
    for token in generate(engine, prompts, sampling=sampling, stop=stop, kv_cache=kv_cache):
        out[token.sequence].append(token.id)
    return out


@pytest.mark.parametrize(
    ("family", "sampling"),
    [(family, GREEDY) for family in DIFFERENT_POSITIONS]
    + [
        ("qwen3", SamplingConfig(temperature=1.2, top_k=0, seed=3)),
        ("gpt2", SamplingConfig(top_k=5, top_p=0.8, seed=4)),
    ],
)
def test_kv_cache_does_not_change_the_text_even_past_the_context(family, sampling):
    engine = TorchEngine(make_model(family, context_length=24).double())
    prompts = [[1, 2, 3], list(range(15)), [7]]
    cached = texts(engine, prompts, 40, sampling=sampling)
    assert cached == texts(engine, prompts, 40, sampling=sampling, kv_cache=False)
    for row, prompt in enumerate(prompts):  # the batch changes nothing, the row's seed does
        alone = texts(engine, [prompt], 40, sampling=sampling)[0]
        assert (alone == cached[row]) == (row == 0 or sampling is GREEDY)


def test_stop_ids_end_a_text_and_min_tokens_delay_them():
    engine = TorchEngine(make_model("gpt2", context_length=24).double())
    (text,) = texts(engine, [[1, 2]], 12)
    end = text[3]
    sampling = replace(GREEDY, stop_token_ids=(end,))
    (stopped,) = texts(engine, [[1, 2]], 12, sampling=sampling)
    assert stopped == text[: text.index(end) + 1]
    (late,) = texts(engine, [[1, 2]], 12, sampling=replace(sampling, min_tokens=8))
    assert len(late) >= 8
    assert end not in late[:8]
    (whole,) = texts(engine, [[1, 2]], 12, sampling=replace(GREEDY, ignore_eos=True), stop=[end])
    assert len(whole) == 12
    assert end not in whole
    vocabulary = Vocabulary([b"a"] * 5)
    for options in ({"stop_token_ids": [5]}, {"logit_bias": {5: 1}}):
        with pytest.raises(UsageError, match="invalid token id 5, expected ids below 5"):
            check_request(Request([1], SamplingConfig(**options)), vocabulary, 24)


def test_continuation_is_the_same_after_a_generated_text_or_a_prompt(family):
    engine = TorchEngine(make_model(family, context_length=24).double())
    sampling = SamplingConfig(temperature=1.0, seed=5)
    (text,) = texts(engine, [[1, 2]], 75, sampling=sampling)
    for n_given in (1, 10, 22, 23, 30, 45, 74):
        prompt = [1, 2, *text[:n_given]]
        (rest,) = texts(engine, [prompt], 75 - n_given, sampling=sampling)
        assert rest == text[n_given:]


def test_text_past_the_context_equals_a_fresh_run_on_the_window(family):
    model = make_model(family, context_length=24).double()
    (text,) = texts(TorchEngine(model), [[1]], 50)
    text = [1, *text]
    for n in range(25, 50):
        window = text[window_start(n, 24) : n]
        assert 12 < len(window) <= 24
        assert TorchEngine(model).extend([window])[0].argmax() == text[n]


def test_overflow_stop_and_error(family):
    engine = TorchEngine(make_model(family).double())
    (slides,) = texts(engine, [[1, 2, 3]], 60)
    stops = replace(GREEDY, overflow="stop", max_new_tokens=60)
    tokens = list(generate(engine, [[1, 2, 3]], sampling=stops))
    assert [token.id for token in tokens] == slides[:46]  # the last one is not in the context
    assert [token.finish for token in tokens] == [None] * 45 + ["context"]
    request = Request([1, 2, 3], replace(GREEDY, overflow="error", max_new_tokens=46))
    check_request(request, Vocabulary(), 48)
    longer = request._replace(prompt=[1, 2, 3, 4])
    with pytest.raises(UsageError, match="do not fit") as error:
        check_request(longer, Vocabulary(), 48)
    assert "-n 45 or less" in error.value.hint
    with pytest.raises(UsageError, match="the prompt has 49 tokens"):
        check_request(Request([1] * 49, stops), Vocabulary(), 48)


@given(st.integers(1, 500), st.integers(1, 64))
def test_window_fits_and_moves_only_if_necessary(n, context):
    start = window_start(n, context)
    assert 1 <= n - start <= context
    if n > context > 1:
        assert n - start > context // 2
    assert window_start(n + 1, context) >= start


def test_sequence_ends_at_a_stop_token():
    engine = TorchEngine(make_model("qwen3"))
    (free,) = texts(engine, [[1, 2, 3]], 20)
    stop = free[6]
    twenty = replace(GREEDY, max_new_tokens=20)
    reports = list(generate(engine, [[1, 2, 3]], sampling=twenty, stop=[stop]))
    assert [r.id for r in reports] == free[: free.index(stop) + 1]
    assert [r.last for r in reports] == [False] * (len(reports) - 1) + [True]
    assert list(generate(engine, [[1]], sampling=replace(GREEDY, max_new_tokens=0))) == []


def test_tokens_report_the_models_own_probabilities():
    engine = TorchEngine(make_model("gpt2"))
    sampling = SamplingConfig(temperature=2.0, seed=1, max_new_tokens=1)
    (report,) = generate(engine, [[1, 2]], sampling=sampling)
    p = softmax(TorchEngine(engine.model).extend([[1, 2]]))[0]
    assert report.logprob == pytest.approx(np.log(p[report.id]), abs=1e-5)
    assert report.rank == int((p > p[report.id]).sum())
    assert report.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
    (report,) = generate(engine, [[1, 2]], sampling=replace(sampling, logprobs=5))
    best = np.argsort(-p)[:5]
    assert [i for i, _ in report.top_logprobs] == best.tolist()
    assert [x for _, x in report.top_logprobs] == pytest.approx(np.log(p[best]).tolist(), abs=1e-5)


def test_undescribed_tokens_are_those_of_a_described_text():
    engine = TorchEngine(make_model("gpt2", context_length=24).double())
    sampling = SamplingConfig(seed=3, max_new_tokens=9)
    pairs = [Request([1, 2], sampling), Request([1, 2], sampling, described=False)]
    tokens = list(
        generate_requests(engine, make_source(pairs), batch_size=2, vocabulary=Vocabulary())
    )
    described, bare = ([t for t in tokens if t.sequence == i] for i in range(2))
    assert [t.id for t in described] == [t.id for t in bare]
    alone = list(generate(engine, [[1, 2]], sampling=sampling))
    assert [t.logprob for t in described] == [t.logprob for t in alone]
    assert all(math.isnan(t.logprob) and math.isnan(t.entropy) and t.rank == -1 for t in bare)


def test_library_and_command_generate_the_same_text(trained):
    model = load(trained, threads=1)
    streamed = "".join(model.stream("The king", max_new_tokens=60, temperature=0.9, seed=8))
    assert (
        streamed
        == model.generate_batch(["The king"], max_new_tokens=60, temperature=0.9, seed=8)[0]
    )
    result = tgen(
        "generate", "-m", trained, "-p", "The king", "-n", 60, "-t", 0.9, "--seed", 8, "--json"
    )
    assert json.loads(result.stdout)["text"] == streamed


def test_calls_may_alternate_and_streams_may_interleave(trained):
    model = load(trained, threads=1)
    alone = model.generate_batch(["The"], max_new_tokens=5, seed=1)
    score = model.score("What is")
    assert model.generate_batch([]) == []
    assert model.generate_batch(["The", "A", "What"], max_new_tokens=5, seed=1)[0] == alone[0]
    assert model.score("What is") == score
    whole = model.generate("The", max_new_tokens=50, seed=2)
    first = model.stream("The", max_new_tokens=50, seed=2)
    start = next(first)
    assert model.generate("The", max_new_tokens=5, seed=1) == alone[0]
    assert start + "".join(first) == whole


def test_shared_prefix_is_computed_once(family, monkeypatch):
    engine = TorchEngine(make_model(family).double())
    calls = []
    extend = engine.extend
    monkeypatch.setattr(
        engine, "extend", lambda tokens, **kw: calls.append(tokens) or extend(tokens, **kw)
    )
    shared = [3, 1, 4, 1, 5, 9, 2, 6]
    for ends in ([[1], [2, 3], [1, 1]], [[], [7]]):
        prompts = [shared + end for end in ends]
        calls.clear()
        batched = texts(engine, prompts, 12)
        n_shared = len(shared) - (min(map(len, ends)) == 0)
        assert calls[0] == [shared[:n_shared]]
        assert calls[1] == [prompt[n_shared:] for prompt in prompts]
        assert batched == [texts(engine, [prompt], 12)[0] for prompt in prompts]
        assert batched == texts(engine, prompts, 12, kv_cache=False)
