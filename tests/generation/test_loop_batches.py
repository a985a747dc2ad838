"""Many texts at once: each is what it would be alone, whenever it began and beside whomever."""

import base64
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from support.command import clean_environment, tgen
from support.models import make_model
from tgen.api import load
from tgen.config import SamplingConfig
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.torch_engine import TorchEngine
from tgen.generation.loop import generate_rows
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.sequence import Request
from tgen.generation.token_bytes import Vocabulary

TOKENS = [bytes([97 + i % 26]) * (1 + i % 3) for i in range(300)]
KINDS = [
    SamplingConfig(temperature=0),
    SamplingConfig(temperature=1.3, top_k=0),
    SamplingConfig(repetition_penalty=1.4, stop=["xx"], ban=["b"]),
    SamplingConfig(overflow="stop", top_p=0.9),
]


def requests(n):
    """Prompts that begin alike or not, some too long, each with settings of its own."""
    random = np.random.default_rng(0)
    made = []
    for i in range(n):
        prompt = [1, 2, 3, *random.integers(0, 5, i % 4)] if i % 5 else list(range(60))
        sampling = KINDS[0 if i % 5 == 0 else i % 4]
        made.append(
            Request(prompt, replace(sampling, max_new_tokens=int(random.integers(1, 70)), seed=i))
        )
    return made


def written(engine, asked, *, n_rows, late=False, **how):
    """Ids of every request; `late`: there is a new one only now and then."""
    waiting, turn = list(asked), [0]

    def give(wait):
        turn[0] += 1
        if not waiting or (late and not wait and turn[0] % 7):
            return None
        return waiting.pop(0)

    out = [[] for _ in asked]
    vocabulary = Vocabulary(TOKENS, ends=[9])
    for token in generate_rows(engine, give, n_rows=n_rows, vocabulary=vocabulary, **how):
        assert not out[token.row] or not out[token.row][-1].last
        out[token.row].append(token)
    assert all(tokens[-1].last for tokens in out)
    return [[(token.id, token.text, token.finish) for token in tokens] for tokens in out]


@pytest.mark.parametrize("on_kernels", [True, False])
def test_a_text_is_the_same_at_any_batch_size_and_whenever_it_began(family, on_kernels):
    model = make_model(family)
    if on_kernels:
        engine = CpuEngine(model.config, model.to_arrays(), n_threads=2)
    else:
        engine = TorchEngine(model.double())
    asked = requests(20)
    alone = [written(engine, [request], n_rows=1)[0] for request in asked]
    for n_rows in (1, 3, 32):
        assert written(engine, asked, n_rows=n_rows) == alone
        assert written(engine, asked, n_rows=n_rows, late=True) == alone
    assert written(engine, asked, n_rows=4, late=True, drafts=NgramDrafter({}, 300)) == alone
    assert written(engine, asked, n_rows=4, kv_cache=False) == alone


def test_samples_share_the_prompts_computation():
    engine, taken = TorchEngine(make_model("qwen3").double()), []
    extend = engine.extend
    engine.extend = lambda rows, **how: taken.append(rows) or extend(rows, **how)
    prompts = [[1, 2, 3, 4], [1, 2, 7]]
    sampling = SamplingConfig(max_new_tokens=5, top_k=0)
    asked = [Request(prompts[i // 3], replace(sampling, seed=i)) for i in range(6)]
    together = written(engine, asked, n_rows=6)
    assert taken[0] == [[1, 2]]  # what all prompts share
    assert taken[1] == [[3, 4], [7]]  # and the rest of each, once
    assert all(len(rows) == 6 for rows in taken[2:])
    assert together == [written(engine, [request], n_rows=1)[0] for request in asked]
    taken.clear()  # a row that comes later takes what a row under way has computed
    longer = Request([1, 2, 3, 4], replace(sampling, max_new_tokens=30))
    written(engine, [longer, longer._replace(prompt=[1, 2, 3, 9])], n_rows=2, late=True)
    assert [9] in [rows[-1] for rows in taken]


def test_a_text_that_cannot_go_on_ends_and_the_others_do_not():
    engine = TorchEngine(make_model("gpt2"))
    letters = [bytes([97 + i]) for i in range(26)]
    stuck = Request([1, 2], SamplingConfig(ban=letters, require=["1"], max_new_tokens=5))
    free = Request([1, 2], SamplingConfig(max_new_tokens=5))
    rows = iter([stuck, free])
    vocabulary = Vocabulary(TOKENS, ends=[9])
    tokens = list(
        generate_rows(engine, lambda _: next(rows, None), n_rows=2, vocabulary=vocabulary)
    )
    (ended,) = [token for token in tokens if token.row == 0]
    assert (ended.id, ended.text, ended.finish, ended.complete) == (9, b"", "stop", False)
    assert [token.complete for token in tokens if token.row == 1][-1]


def objects(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def written_bytes(one):
    return base64.b64decode(one["bytes"]) if "bytes" in one else one["text"].encode()


def test_rows_of_the_command_are_those_of_single_commands(trained):
    rows = [
        {"prompt": "What", "id": "first"},
        {"prompt": "The king", "temperature": 0, "max-new-tokens": 4},
        {"prompt": "is", "seed": 5, "stop": "a", "echo": True},
        {"prompt": "", "samples": 2, "top_k": 3, "logprobs": 2, "explain": True},
        {"prompt_bytes": "/w==", "bias": {"t": 5}, "samplers": "top_k,temperature"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    given = ["generate", "-m", trained, "-n", 9, "-q", "--jsonl"]
    results = [
        tgen(*given, "--seed", 3, "--input", "-", "--batch-size", size, stdin=lines)
        for size in (1, 32)
    ]
    assert [result.returncode for result in results] == [0, 0]
    found, other = map(objects, results)
    for one, two in zip(found, other, strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}
    assert [one["row"] for one in found] == [0, 1, 2, 3, 3, 4]
    assert [one["sample"] for one in found] == [0, 0, 0, 0, 1, 0]
    assert found[0]["id"] == "first"
    assert found[2]["text"].startswith("is")
    assert len(found[3]["likeliest"][0]) == 2
    for row, options in [(0, ["-p", "What"]), (1, ["-p", "The king", "-t", 0, "-n", 4])]:
        (single,) = objects(tgen(*given, *options, "--seed", found[row]["seed"]))
        assert single["tokens"] == found[row]["tokens"]
        assert single["text"] == found[row]["text"]


def test_every_sample_of_every_row_has_a_seed_of_its_own(trained):
    lines = b'{"prompt": "What", "n": 3}\n' * 8
    given = ["generate", "-m", trained, "--input", "/dev/stdin", "--jsonl", "--samples", 8, "-q"]
    found = objects(tgen(*given, "--seed", 2, stdin=lines))
    assert len({one["seed"] for one in found}) == len(found) == 64
    assert {len(one["tokens"]) for one in found} <= {1, 2, 3}


def test_bad_rows_become_errors_and_the_rest_go_on(trained):
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
    given = ["generate", "-m", trained, "-n", 2, "--input", "-", "--jsonl"]
    result = tgen(*given, stdin=b"\n".join(lines))
    found = objects(result)
    assert result.returncode == 1
    assert [one["line"] for one in found] == [1, 2, 3, 4, *range(6, 21)]
    assert ["error" in one for one in found] == [False, *[True] * 17, False]
    assert all(one["error"]["message"] and one["error"]["hint"] for one in found[1:-1])
    assert "did you mean temperature" in found[6]["error"]["hint"]
    assert result.stderr.count(b"error: line ") == 17
    assert b"Traceback" not in result.stderr


def test_lines_of_text_are_prompts(trained):
    given = ["generate", "-m", trained, "-n", 3, "-q", "--seed", 1]
    lines = b"What is\r\n\n\xff\xfe{\nlast"
    found = objects(tgen(*given, "--input", "-", "--jsonl", stdin=lines))
    assert [one["prompt_tokens"] for one in found][1] == 1  # where documents start
    assert "prompt_bytes" in found[2]
    plain = tgen(*given, "--input", "-", stdin=lines)
    assert plain.stdout == b"".join(written_bytes(one) + b"\n" for one in found)
    samples = tgen(*given, "-p", "What is", "--samples", 3)
    assert samples.stdout.startswith(written_bytes(found[0]) + b"\n")


def test_a_row_comes_out_before_the_next_goes_in(trained):
    command = [sys.executable, "-m", "tgen", "generate", "-m", str(trained), "-q", "-n", "2"]
    with subprocess.Popen(
        [*command, "--input", "-", "--jsonl"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        for row in range(3):  # would wait for ever if rows waited for the end of the input
            process.stdin.write(b"the king\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["row"] == row
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_the_library_has_the_same_rows(trained):
    model = load(trained, threads=1)
    prompts = ["What", "The king", b"\xff", "is"]
    options = dict(max_new_tokens=12, seed=4, stop=["k"], top_p=0.9)
    found = model.generate_batch(prompts, **options)
    assert found == model.generate_batch(prompts, batch_size=1, **options)
    assert found[0] == "".join(model.generate("What", **options))
    assert not any("k" in text for text in found)
