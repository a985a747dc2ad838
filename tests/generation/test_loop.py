"""Sampling and the loop: exact borders, no state, the same text however it is computed."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tgen.reports import Removed

GREEDY = SamplingConfig(temperature=0)


def texts(engine, prompts, n, *, sampling=GREEDY, stop=(), kv_cache=True):
    out = [[] for _ in prompts]
    sampling = replace(sampling, max_new_tokens=n)
    for token in generate(engine, prompts, sampling=sampling, stop=stop, kv_cache=kv_cache):
        out[token.row].append(token.id)
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingConfig(temperature=1.2, top_k=0, seed=3),
        SamplingConfig(top_k=5, top_p=0.8, seed=4),
    ],
)
def test_text_with_and_without_the_cache_is_equal_past_the_context_too(family, sampling):
    engine = TorchEngine(make_model(family).double())
    prompts = [[1, 2, 3], list(range(30)), [7]]
    cached = texts(engine, prompts, 100, sampling=sampling)
    assert cached == texts(engine, prompts, 100, sampling=sampling, kv_cache=False)
    for row, prompt in enumerate(prompts):  # neighbours change nothing; row numbers do
        alone = texts(engine, [prompt], 100, sampling=sampling)[0]
        assert (alone == cached[row]) == (row == 0 or sampling is GREEDY)


def test_a_text_goes_on_alike_whether_its_beginning_was_generated_or_given(family):
    engine = TorchEngine(make_model(family).double())
    sampling = SamplingConfig(temperature=1.0, seed=5)
    (whole,) = texts(engine, [[1, 2]], 150, sampling=sampling)
    for given_already in (1, 20, 46, 47, 60, 90, 149):
        prompt = [1, 2, *whole[:given_already]]
        (rest,) = texts(engine, [prompt], 150 - given_already, sampling=sampling)
        assert rest == whole[given_already:]


def test_past_the_context_equals_a_fresh_run_on_what_is_kept(family):
    model = make_model(family).double()
    (whole,) = texts(TorchEngine(model), [[1]], 80)
    text = [1, *whole]
    for n in range(49, 80):
        window = text[window_start(n, 48) : n]
        assert 24 < len(window) <= 48
        assert TorchEngine(model).extend([window])[0].argmax() == text[n]


def test_a_text_ends_where_the_context_is_full_if_it_is_to(family):
    engine = TorchEngine(make_model(family).double())
    (slides,) = texts(engine, [[1, 2, 3]], 60)
    stops = replace(GREEDY, overflow="stop", max_new_tokens=60)
    found = list(generate(engine, [[1, 2, 3]], sampling=stops))
    assert [token.id for token in found] == slides[:46]  # the last is seen by nobody
    assert [token.finish for token in found] == [None] * 45 + ["context"]
    asked = Request([1, 2, 3], replace(GREEDY, overflow="error", max_new_tokens=46))
    check_request(asked, Vocabulary(), 48)
    longer = asked._replace(prompt=[1, 2, 3, 4])
    with pytest.raises(UsageError, match="do not fit") as error:
        check_request(longer, Vocabulary(), 48)
    assert "at most 45" in error.value.hint
    with pytest.raises(UsageError, match="the prompt has 49 tokens"):
        check_request(Request([1] * 49, stops), Vocabulary(), 48)


@given(st.integers(1, 500), st.integers(1, 64))
def test_a_window_fits_and_moves_only_when_it_must(n, context):
    start = window_start(n, context)
    assert 1 <= n - start <= context
    if n > context > 1:
        assert n - start > context // 2
    assert window_start(n + 1, context) >= start


def test_rows_end_at_a_stop_token_and_say_so():
    engine = TorchEngine(make_model("qwen3"))
    (free,) = texts(engine, [[1, 2, 3]], 20)
    stop = free[6]
    twenty = replace(GREEDY, max_new_tokens=20)
    reports = list(generate(engine, [[1, 2, 3]], sampling=twenty, stop=[stop]))
    assert [r.id for r in reports] == free[: free.index(stop) + 1]
    assert [r.last for r in reports] == [False] * (len(reports) - 1) + [True]
    assert list(generate(engine, [[1]], sampling=replace(GREEDY, max_new_tokens=0))) == []


def test_reports_carry_the_models_own_probabilities():
    engine = TorchEngine(make_model("gpt2"))
    sampling = SamplingConfig(temperature=2.0, seed=1, max_new_tokens=1)
    (report,) = generate(engine, [[1, 2]], sampling=sampling)
    p = softmax(TorchEngine(engine.model).extend([[1, 2]]))[0]
    assert report.logprob == pytest.approx(np.log(p[report.id]), abs=1e-5)
    assert report.rank == int((p > p[report.id]).sum())
    assert report.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
    (report,) = generate(engine, [[1, 2]], sampling=replace(sampling, logprobs=5))
    best = np.argsort(-p)[:5]
    assert [i for i, _ in report.likeliest] == best.tolist()
    assert [x for _, x in report.likeliest] == pytest.approx(np.log(p[best]).tolist(), abs=1e-5)


def test_what_each_sampler_removed_is_told_and_changes_nothing():
    logits = np.random.default_rng(3).normal(size=(2, 50)).astype(np.float32) * 2
    sampling = SamplingConfig(top_k=20, top_p=0.8, min_p=0.05, seed=1)
    told: list[list[Removed]] = [[], []]
    how = dict(seeds=[1, 2], positions=[3, 4])
    assert sample(logits, sampling, **how, explanations=told) == sample(logits, sampling, **how)
    for row, steps in zip(logits, told, strict=True):
        assert [step.sampler for step in steps] == ["top_k", "top_p", "min_p", "temperature"]
        left = np.sort(row)[::-1].astype(np.float64)
        for step in steps[:3]:
            p = softmax(left[None])[0]
            assert step.left + step.candidates == len(left)
            assert step.probability == pytest.approx(p[step.left :].sum())
            left = left[: step.left]
    greedy: list[list[Removed]] = [[], []]
    wanted = sample(logits, GREEDY, **how)
    assert sample(logits, GREEDY, **how, explanations=greedy) == wanted
    assert [steps[-1].left for steps in greedy] == [1, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(0, 14))
def test_the_k_likeliest_stand_in_order_even_among_equals(values, k):
    (ids,), (ranked,) = sort_candidates(np.array([values], np.float32), k)
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert ids.tolist() == best[: k or len(values)]
    assert ranked.tolist() == [values[i] for i in ids]


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12), st.floats(0.01, 1))
def test_top_p_keeps_the_fewest_that_reach_p(values, p):
    _, ranked = sort_candidates(np.array([values], np.float32), 0)
    kept = int((top_p(ranked, p) > -np.inf).sum())
    probabilities = softmax(ranked)[0]
    assert (top_p(ranked, p)[0, :kept] > -np.inf).all()
    assert probabilities[: kept - 1].sum() < p + 1e-12
    assert kept == len(values) or probabilities[:kept].sum() >= p - 1e-12


def test_random_numbers_are_a_function_of_their_coordinates():
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
def test_extreme_temperatures_and_logits_draw_an_allowed_token(temperature, seed):
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
def test_impossible_settings_are_refused(values):
    with pytest.raises(UsageError):
        SamplingConfig(**values)


def test_the_library_streams_what_the_command_prints(trained):
    model = load(trained, threads=1)
    streamed = "".join(model.generate("The king", max_new_tokens=60, temperature=0.9, seed=8))
    assert (
        streamed
        == model.generate_batch(["The king"], max_new_tokens=60, temperature=0.9, seed=8)[0]
    )
    from support.command import tgen

    said = tgen(
        "generate", "-m", trained, "-p", "The king", "-n", 60, "-t", 0.9, "--seed", 8, "--json"
    )
    assert json.loads(said.stdout)["text"] == streamed


def test_a_models_methods_mix_but_two_texts_at_once_are_refused(trained):
    model = load(trained, threads=1)
    alone = model.generate_batch(["The"], max_new_tokens=5, seed=1)
    score = model.score("What is")
    assert model.generate_batch([]) == []
    assert model.generate_batch(["The", "A", "What"], max_new_tokens=5, seed=1)[0] == alone[0]
    assert model.score("What is") == score
    first = model.generate("The", max_new_tokens=50)
    next(first)
    assert "".join(model.generate("The", max_new_tokens=5, seed=1)) == alone[0]
    with pytest.raises(RuntimeError, match="another text was started"):
        list(first)


def test_damaged_weights_are_said_to_be():
    logits = np.full((1, 4), np.nan, np.float32)
    with pytest.raises(ModelError, match="not finite"):
        sample(logits, GREEDY, seeds=[0], positions=[1])


def test_score_is_the_surprise_of_the_whole_text(trained):
    model = load(trained, threads=1)
    text = "The king said: what is this? " * 5
    stream = [0, *model.encode(text)]
    nats, length = 0.0, model.engine.context_length
    for n in range(1, len(stream)):
        model.engine.rewind([0])
        first = 0 if n <= length else window_start(n, length)
        (logits,) = model.engine.extend([stream[first:n]])
        nats -= np.log(softmax(logits[None])[0, stream[n]])
    assert model.score(text) == pytest.approx(nats / np.log(2) / len(text), rel=1e-4)


def test_what_prompts_share_is_computed_once_and_changes_nothing(family, monkeypatch):
    engine = TorchEngine(make_model(family).double())
    taken = []
    extend = engine.extend
    monkeypatch.setattr(engine, "extend", lambda rows: taken.append(rows) or extend(rows))
    shared = [3, 1, 4, 1, 5, 9, 2, 6]
    for ends in ([[1], [2, 3], [1, 1]], [[], [7]]):
        prompts = [shared + end for end in ends]
        taken.clear()
        together = texts(engine, prompts, 12)
        n_shared = len(shared) - (min(map(len, ends)) == 0)
        assert taken[0] == [shared[:n_shared]]
        assert taken[1] == [prompt[n_shared:] for prompt in prompts]
        assert together == [texts(engine, [prompt], 12)[0] for prompt in prompts]
        assert together == texts(engine, prompts, 12, kv_cache=False)
