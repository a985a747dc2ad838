"""The generation loop: the same text however it is computed."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.command import tgen
from support.models import make_model
from tgen.api import load
from tgen.config import SamplingConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError, UsageError
from tgen.generation.loop import generate
from tgen.generation.samplers import softmax, sort_candidates, top_p
from tgen.generation.sampling import row_seed, sample, uniform
from tgen.generation.sequence import Request, check_request, window_start
from tgen.generation.token_bytes import Vocabulary
from tgen.reports import RemovedCandidates

GREEDY = SamplingConfig(temperature=0)


def texts(engine, prompts, n, *, sampling=GREEDY, stop=(), kv_cache=True):
    out = [[] for _ in prompts]
    sampling = replace(sampling, max_new_tokens=n)
    for token in generate(engine, prompts, sampling=sampling, stop=stop, kv_cache=kv_cache):
        out[token.sequence].append(token.id)
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingConfig(temperature=1.2, top_k=0, seed=3),
        SamplingConfig(top_k=5, top_p=0.8, seed=4),
    ],
)
def test_kv_cache_does_not_change_the_text_even_past_the_context(family, sampling):
    engine = TorchEngine(make_model(family).double())
    prompts = [[1, 2, 3], list(range(30)), [7]]
    cached = texts(engine, prompts, 100, sampling=sampling)
    assert cached == texts(engine, prompts, 100, sampling=sampling, kv_cache=False)
    for row, prompt in enumerate(prompts):  # the batch changes nothing, the row's seed does
        alone = texts(engine, [prompt], 100, sampling=sampling)[0]
        assert (alone == cached[row]) == (row == 0 or sampling is GREEDY)


def test_continuation_is_the_same_after_a_generated_text_or_a_prompt(family):
    engine = TorchEngine(make_model(family).double())
    sampling = SamplingConfig(temperature=1.0, seed=5)
    (text,) = texts(engine, [[1, 2]], 150, sampling=sampling)
    for n_given in (1, 20, 46, 47, 60, 90, 149):
        prompt = [1, 2, *text[:n_given]]
        (rest,) = texts(engine, [prompt], 150 - n_given, sampling=sampling)
        assert rest == text[n_given:]


def test_text_past_the_context_equals_a_fresh_run_on_the_window(family):
    model = make_model(family).double()
    (text,) = texts(TorchEngine(model), [[1]], 80)
    text = [1, *text]
    for n in range(49, 80):
        window = text[window_start(n, 48) : n]
        assert 24 < len(window) <= 48
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


def test_explanations_count_removed_candidates_and_change_nothing():
    logits = np.random.default_rng(3).normal(size=(2, 50)).astype(np.float32) * 2
    sampling = SamplingConfig(top_k=20, top_p=0.8, min_p=0.05, seed=1)
    explanations: list[list[RemovedCandidates]] = [[], []]
    options = dict(seeds=[1, 2], positions=[3, 4])
    assert sample(logits, sampling, **options, explanations=explanations) == sample(
        logits, sampling, **options
    )
    for row, steps in zip(logits, explanations, strict=True):
        assert [step.sampler for step in steps] == ["top_k", "top_p", "min_p", "temperature"]
        left = np.sort(row)[::-1].astype(np.float64)
        for step in steps[:3]:
            p = softmax(left[None])[0]
            assert step.left + step.candidates == len(left)
            assert step.probability == pytest.approx(p[step.left :].sum())
            left = left[: step.left]
    greedy: list[list[RemovedCandidates]] = [[], []]
    expected = sample(logits, GREEDY, **options)
    assert sample(logits, GREEDY, **options, explanations=greedy) == expected
    assert [steps[-1].left for steps in greedy] == [1, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 14))
def test_k_most_likely_are_sorted_with_ties_by_id(values, k):
    (ids,), (ranked,) = sort_candidates(np.array([values], np.float32), k)
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert ids.tolist() == best[: k or len(values)]
    assert ranked.tolist() == [values[i] for i in ids]


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12), st.floats(0.01, 1))
def test_top_p_keeps_the_fewest_candidates_with_mass_p(values, p):
    _, ranked = sort_candidates(np.array([values], np.float32), 0)
    kept = int((top_p(ranked, p) > -np.inf).sum())
    probabilities = softmax(ranked)[0]
    assert (top_p(ranked, p)[0, :kept] > -np.inf).all()
    assert probabilities[: kept - 1].sum() < p + 1e-12
    assert kept == len(values) or probabilities[:kept].sum() >= p - 1e-12


def test_random_numbers_are_a_function_of_seed_position_and_purpose():
    seen = {uniform(s, p, purpose) for s in range(5) for p in range(40) for purpose in range(5)}
    assert len(seen) == 1000
    assert all(0 <= u < 1 for u in seen)
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 3, 2)
    assert len({row_seed(7, row) for row in range(1000)}) == 1000
    assert row_seed(7, 0) == 7
    assert row_seed(2**63 - 1, 5) < 2**53
    assert abs(np.mean(list(seen)) - 0.5) < 0.05


@given(st.floats(1e-45, 1e30), st.integers(0, 2**63 - 1))
@settings(deadline=None)
def test_extreme_temperatures_and_logits_sample_an_allowed_token(temperature, seed):
    logits = np.array([[3e38, -3e38, 0, -np.inf, 5]], np.float32)
    sampling = SamplingConfig(temperature=temperature, top_k=0, seed=seed)
    assert sample(logits, sampling, seeds=[seed], positions=[9])[0] in (0, 1, 2, 4)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": float("nan")},
        {"temperature": -1},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
)
def test_invalid_settings_raise(values):
    with pytest.raises(UsageError):
        SamplingConfig(**values)


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


def test_calls_may_alternate_but_two_streams_at_once_raise(trained):
    model = load(trained, threads=1)
    alone = model.generate_batch(["The"], max_new_tokens=5, seed=1)
    score = model.score("What is")
    assert model.generate_batch([]) == []
    assert model.generate_batch(["The", "A", "What"], max_new_tokens=5, seed=1)[0] == alone[0]
    assert model.score("What is") == score
    first = model.stream("The", max_new_tokens=50)
    next(first)
    assert model.generate("The", max_new_tokens=5, seed=1) == alone[0]
    with pytest.raises(RuntimeError, match="another text was started"):
        list(first)


def test_nan_logits_raise():
    logits = np.full((1, 4), np.nan, np.float32)
    with pytest.raises(ModelError, match="not finite"):
        sample(logits, GREEDY, seeds=[0], positions=[1])


def test_score_is_the_bits_per_byte_of_the_text(trained):
    model = load(trained, threads=1)
    text = "The king result: what is this? " * 5
    stream = [0, *model.encode(text)]
    nats, length = 0.0, model.engine.context_length
    for n in range(1, len(stream)):
        model.engine.rewind([0])
        first = 0 if n <= length else window_start(n, length)
        (logits,) = model.engine.extend([stream[first:n]])
        nats -= np.log(softmax(logits[None])[0, stream[n]])
    assert model.score(text) == pytest.approx(nats / np.log(2) / len(text), rel=1e-4)


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
