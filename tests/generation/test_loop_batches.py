"""Continuous batching: a text is the same in any batch and whenever it starts."""

import base64
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from support.command import clean_environment, tgen
from support.models import cpu_engine, make_model
from tgen.config import SamplingConfig
from tgen.engine.base import Engine
from tgen.engine.torch_engine import TorchEngine
from tgen.generation import loop
from tgen.generation.loop import generate_requests
from tgen.generation.model_drafter import ModelDrafter
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.sequence import Request
from tgen.generation.vocabulary import Vocabulary
from tgen.python_api import load

TOKENS = [bytes([97 + i % 26]) * (1 + i % 3) for i in range(300)]
KINDS = [
    SamplingConfig(temperature=0),
    SamplingConfig(temperature=1.3, top_k=0),
    SamplingConfig(repetition_penalty=1.4, stop=["xx"], ban=["b"]),
    SamplingConfig(overflow="stop", top_p=0.9),
]
MORE_KINDS = [
    SamplingConfig(temperature=0.7, top_k=0, regex="[a-m]{1,9}( [n-z]+)*", logprobs=2),
    SamplingConfig(require=["yes"], ban=["aa"], dry_multiplier=0.8, xtc_probability=0.5),
]


def make_requests(n, kinds=KINDS):
    """Requests with or without a shared prefix, some longer than a context of 24, with different
    settings."""
    random = np.random.default_rng(0)
    requests = []
    for i in range(n):
        prompt = [1, 2, 3, *random.integers(0, 5, i % 4)] if i % 5 else list(range(30))
        sampling = kinds[0 if i % 5 == 0 else i % len(kinds)]
        requests.append(
            Request(prompt, replace(sampling, max_new_tokens=int(random.integers(1, 35)), seed=i))
        )
    return requests


def run(engine, requests, *, batch_size, late=False, **options):
    """Return the tokens of each request, of torch only what does not depend on rounding; `late`:
    requests arrive now and then."""
    waiting, turn = list(requests), [0]

    def source(wait):
        turn[0] += 1
        if not waiting or (late and not wait and turn[0] % 7):
            return None
        return waiting.pop(0)

    out = [[] for _ in requests]
    vocabulary = Vocabulary(TOKENS, ends=[9])
    for token in generate_requests(
        engine, source, batch_size=batch_size, vocabulary=vocabulary, **options
    ):
        assert not out[token.sequence] or not out[token.sequence][-1].last
        out[token.sequence].append(token)
    assert all(tokens[-1].last for tokens in out)
    if engine.name == "kernels":
        return [[token._replace(sequence=0) for token in tokens] for tokens in out]  # bit for bit
    return [[(token.id, token.text, token.finish) for token in tokens] for tokens in out]


@pytest.mark.parametrize("kernels", [True, False])
def test_text_is_the_same_at_any_batch_size_and_start_time(family, kernels):
    model = make_model(family, context_length=24)
    engine: Engine
    if kernels:
        engine = cpu_engine(model.config, model.to_arrays(), n_threads=2)
    else:
        engine = TorchEngine(model.double())
    requests = make_requests(12)
    alone = [run(engine, [request], batch_size=1)[0] for request in requests]
    for batch_size, late in ((1, True), (3, True), (3, False), (32, True))[0 if kernels else 1 :]:
        assert run(engine, requests, batch_size=batch_size, late=late) == alone
    assert run(engine, requests, batch_size=4, late=True, drafts=NgramDrafter()) == alone
    assert run(engine, requests, batch_size=4, kv_cache=False) == alone


@pytest.mark.parametrize("late", [False, True])
def test_text_is_the_same_when_prompts_are_computed_in_parts(family, late, monkeypatch):
    model = make_model(family, context_length=24)
    engine = cpu_engine(model.config, model.to_arrays(), n_threads=1)
    requests = [*make_requests(12), *make_requests(12)]  # some prompts twice, with other lengths
    requests[12:] = [r._replace(prompt=[*r.prompt, *range(7, 15)]) for r in requests[12:]]
    requests += [r._replace(sampling=r.sampling.with_seed(99)) for r in requests[-3:]]
    whole = run(engine, requests, batch_size=5, late=late)
    monkeypatch.setattr(loop, "_PASS_TOKENS", 8)
    monkeypatch.setattr(loop, "_MIN_PROMPT_PART", 3)
    of_model = ModelDrafter(engine.clone(), Vocabulary(TOKENS, ends=[9]), relative_cost=0.1)
    for drafter in (None, NgramDrafter(), of_model):
        assert run(engine, requests, batch_size=5, late=late, drafts=drafter) == whole
    assert run(engine, requests, batch_size=5, kv_cache=False) == whole


def test_texts_wait_for_a_prefix_that_is_computed_in_parts(monkeypatch):
    model = make_model("qwen3", context_length=128)
    engine = cpu_engine(model.config, model.to_arrays(), n_threads=1)
    monkeypatch.setattr(loop, "_PASS_TOKENS", 16)
    monkeypatch.setattr(loop, "_MIN_PROMPT_PART", 4)
    shared = [*range(10, 110)]
    prompts = [shared, *([*shared, i] for i in range(3)), [1, 2]]
    requests = [
        Request(prompt, SamplingConfig(max_new_tokens=5, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    alone = [run(engine, [request], batch_size=1)[0] for request in requests]
    arrivals = iter([requests[0], None, *requests[1:]])
    counts, extend = [], engine.extend
    monkeypatch.setattr(
        engine,
        "extend",
        lambda tokens, **kw: counts.append([*map(len, tokens)]) or extend(tokens, **kw),
    )
    vocabulary = Vocabulary(TOKENS, ends=[9])
    generated = list(
        generate_requests(
            engine, lambda _: next(arrivals, None), batch_size=5, vocabulary=vocabulary
        )
    )
    for number, tokens in enumerate(alone):
        assert [t._replace(sequence=0) for t in generated if t.sequence == number] == tokens
    assert sum(n for count in counts for n in count if n > 1) <= 100 + 3 * 2 + 2
    assert [token.sequence for token in generated].index(4) < 5  # does not wait behind the others


def test_texts_go_on_and_short_prompts_start_beside_a_long_one(monkeypatch):
    model = make_model("qwen3", context_length=64)
    engine = cpu_engine(model.config, model.to_arrays(), n_threads=1)
    monkeypatch.setattr(loop, "_PASS_TOKENS", 8)
    monkeypatch.setattr(loop, "_MIN_PROMPT_PART", 4)
    given = ([1, 2], 30), ([7] * 40, 2), ([7] * 40, 3), ([3, 4], 2)
    first, *long, short = (
        Request(prompt, SamplingConfig(max_new_tokens=n, top_k=0, seed=n)) for prompt, n in given
    )
    alone = [run(engine, [request], batch_size=1)[0] for request in (first, *long, short)]
    arrivals = iter([first, None, *long, None, short])
    counts, extend = [], engine.extend
    monkeypatch.setattr(
        engine,
        "extend",
        lambda tokens, **kw: counts.append([*map(len, tokens)]) or extend(tokens, **kw),
    )
    generated = list(
        generate_requests(
            engine,
            lambda _: next(arrivals, None),
            batch_size=4,
            vocabulary=Vocabulary(TOKENS, ends=[9]),
        )
    )
    for number, tokens in enumerate(alone):
        assert [t._replace(sequence=0) for t in generated if t.sequence == number] == tokens
    order = [token.sequence for token in generated]
    assert order[0] == 0
    assert order.index(3) < order.index(1)
    assert 0 in order[order.index(3) : order.index(1)]
    assert max(map(max, counts)) <= 8
    assert sum(n for count in counts for n in count if n > 1) <= 2 + 40 + 2  # samples share slots


@pytest.mark.parametrize("batch_size", [1, 3])
def test_tokens_are_the_same_with_drafts_of_a_model(batch_size):
    model = make_model("mistral", context_length=24)
    engine = cpu_engine(model.config, model.to_arrays(), n_threads=1)
    other = make_model("llama", seed=1, context_length=20)
    other_engine = cpu_engine(other.config, other.to_arrays(), n_threads=1)
    requests = make_requests(18, [*KINDS, *MORE_KINDS])
    alone = run(engine, requests, batch_size=batch_size)
    for draft_engine in (engine.clone(), other_engine):
        drafts = ModelDrafter(draft_engine, Vocabulary(TOKENS, ends=[9]), relative_cost=0.05)
        assert run(engine, requests, batch_size=batch_size, late=True, drafts=drafts) == alone


def test_samples_share_the_prefill():
    engine, calls = TorchEngine(make_model("qwen3").double()), []
    extend = engine.extend
    engine.extend = lambda tokens, **kw: calls.append(tokens) or extend(tokens, **kw)
    prompts = [[1, 2, 3, 4], [1, 2, 7]]
    sampling = SamplingConfig(max_new_tokens=5, top_k=0)
    requests = [Request(prompts[i // 3], replace(sampling, seed=i)) for i in range(6)]
    batched = run(engine, requests, batch_size=6)
    assert calls[0] == [[1, 2]]  # the shared prefix
    assert calls[1] == [[3, 4], [7]]  # then the rest of each, once
    assert all(len(tokens) == 6 for tokens in calls[2:])
    assert batched == [run(engine, [request], batch_size=1)[0] for request in requests]
    calls.clear()  # a late request reuses the prefix of an active sequence
    longer = Request([1, 2, 3, 4], replace(sampling, max_new_tokens=30))
    run(engine, [longer, longer._replace(prompt=[1, 2, 3, 9])], batch_size=2, late=True)
    assert [9] in [tokens[-1] for tokens in calls]


def test_sequence_without_allowed_tokens_ends_alone():
    engine = TorchEngine(make_model("gpt2"))
    letters = [bytes([97 + i]) for i in range(26)]
    stuck = Request([1, 2], SamplingConfig(ban=letters, require=["1"], max_new_tokens=5))
    free = Request([1, 2], SamplingConfig(max_new_tokens=5))
    requests = iter([stuck, free])
    vocabulary = Vocabulary(TOKENS, ends=[9])
    tokens = list(
        generate_requests(
            engine, lambda _: next(requests, None), batch_size=2, vocabulary=vocabulary
        )
    )
    (ended,) = [token for token in tokens if token.sequence == 0]
    assert (ended.id, ended.text, ended.finish, ended.complete) == (9, b"", "stop", False)
    assert [token.complete for token in tokens if token.sequence == 1][-1]


def objects(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def written_bytes(one):
    return base64.b64decode(one["bytes"]) if "bytes" in one else one["text"].encode()


def test_input_rows_equal_single_commands(trained):
    rows = [
        {"prompt": "What", "id": "first"},
        {"prompt": "The king", "temperature": 0, "max-new-tokens": 4},
        {"prompt": "is", "seed": 5, "stop": "a", "echo": True},
        {"prompt": "", "samples": 2, "top_k": 3, "logprobs": 2, "explain": True},
        {"prompt_bytes": "/w==", "bias": {"t": 5}, "samplers": "top_k,temperature"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    command = ["generate", "-m", trained, "-n", 9, "-q", "--jsonl"]
    results = [
        tgen(*command, "--seed", 3, "--input", "-", "--batch-size", size, stdin=lines)
        for size in (1, 32)
    ]
    assert [result.returncode for result in results] == [0, 0]
    records, other = map(objects, results)
    for one, two in zip(records, other, strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}
    assert [one["row"] for one in records] == [0, 1, 2, 3, 3, 4]
    assert [one["sample"] for one in records] == [0, 0, 0, 0, 1, 0]
    assert records[0]["id"] == "first"
    assert records[2]["text"].startswith("is")
    assert len(records[3]["top_logprobs"][0]) == 2
    single_options: list[tuple[int, list[object]]] = [
        (0, ["-p", "What"]),
        (1, ["-p", "The king", "-t", 0, "-n", 4]),
    ]
    for row, options in single_options:
        (single,) = objects(tgen(*command, *options, "--seed", records[row]["seed"]))
        assert single["tokens"] == records[row]["tokens"]
        assert single["text"] == records[row]["text"]


def test_every_sample_of_every_row_has_its_own_seed(trained):
    lines = b'{"prompt": "What", "n": 3}\n' * 8
    command = ["generate", "-m", trained, "--input", "/dev/stdin", "--jsonl", "--samples", 8, "-q"]
    records = objects(tgen(*command, "--seed", 2, stdin=lines))
    assert len({one["seed"] for one in records}) == len(records) == 64
    assert {len(one["tokens"]) for one in records} <= {1, 2, 3}


def test_invalid_rows_become_errors_and_the_rest_continue(trained):
    lines = [
        b'{"prompt": "a"}',
        b"{nonsense",
        b"[1]",
        b'{"prompt": 3}',
        b"",
        b'{"prompt": "a", "temperature": "hot"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temprature": 1}',
        b'{"prompt": "a", "model": "x"}',
        b'{"prompt": "a", "samples": 0}',
        b'{"prompt": "a", "stop": [""]}',
        b'{"prompt": "a", "top_k": true}',
        b'{"prompt": "a", "overflow": "error", "max_new_tokens": 9999}',
        b'{"prompt": "a", "regex": "("}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"prompt": "a", "prompt_bytes": "YQ=="}',
        b'{"prompt": "a", "top_k": 1, "top-k": 2}',
        b'{"prompt": "b"}',
    ]
    command = ["generate", "-m", trained, "-n", 2, "--input", "-", "--jsonl"]
    result = tgen(*command, stdin=b"\n".join(lines))
    records = objects(result)
    assert result.returncode == 1
    assert [one["line"] for one in records] == [1, 2, 3, 4, *range(6, 21)]
    assert ["error" in one for one in records] == [False, *[True] * 17, False]
    assert all(one["error"]["message"] and one["error"]["hint"] for one in records[1:-1])
    assert "did you mean temperature" in records[6]["error"]["hint"]
    assert result.stderr.count(b"error: line ") == 17
    assert b"Traceback" not in result.stderr


def test_text_lines_are_prompts(trained):
    command = ["generate", "-m", trained, "-n", 3, "-q", "--seed", 1]
    lines = b"What is\r\n\n\xff\xfe{\nlast"
    records = objects(tgen(*command, "--input", "-", "--jsonl", stdin=lines))
    assert [one["prompt_tokens"] for one in records][1] == 1  # the start token
    assert "prompt_bytes" in records[2]
    plain = tgen(*command, "--input", "-", stdin=lines)
    assert plain.stdout == b"".join(written_bytes(one) + b"\n" for one in records)
    samples = tgen(*command, "-p", "What is", "--samples", 3)
    assert samples.stdout.startswith(written_bytes(records[0]) + b"\n")


def test_row_is_written_before_the_next_is_read(trained):
    command = [sys.executable, "-m", "tgen", "generate", "-m", str(trained), "-q", "-n", "2"]
    with subprocess.Popen(
        [*command, "--input", "-", "--jsonl"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        for row in range(3):  # blocks forever if rows wait for the end of the input
            process.stdin.write(b"the king\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["row"] == row
        process.stdin.close()
        assert process.wait(timeout=900) == 0


def test_generate_batch_equals_single_texts(trained):
    model = load(trained, threads=1)
    prompts = ["What", "The king", b"\xff", "is"]
    options = dict(max_new_tokens=12, seed=4, stop=["k"], top_p=0.9)
    texts = model.generate_batch(prompts, **options)
    assert texts == model.generate_batch(prompts, batch_size=1, **options)
    assert texts[0] == model.generate("What", **options)
    assert not any("k" in text for text in texts)
