"""`tgen generate --input` on several ranks: same output as one process, errors printed once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from support.command import clean_environment
from support.models import make_model
from tgen.checkpoint import model_dir

Ranks = Callable[..., list[SimpleNamespace]]
ROWS = [
    {"prompt": "What", "n": 7},
    {"prompt": "The king", "samples": 3, "id": 4},
    {"prompt": 5},
    {"prompt": "", "echo": True, "temperature": 0},
    {"prompt_bytes": "/w==", "echo": True, "n": 30},
    {"prompt": "is", "n": 0, "samples": 2},
    {"prompt": "crown", "seed": 5, "stop": "a"},
    "no JSON",
    *({"prompt": "naïve 🦋"[: i % 8], "n": 1 + 5 * i % 17} for i in range(12)),
]
LINES = "\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in ROWS)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    transformer = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(folder, transformer.config, tokenizer, transformer.to_arrays())
    return folder


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES)
    return path


def command(model, rows, *more):
    return ["generate", "-m", model, "--input", rows, "-n", 9, "--batch-size", 2, *more]


def stderr_lines(ranks):
    return [line for rank in ranks for line in rank.err.splitlines()]


@pytest.mark.parametrize("form", ["--jsonl", "--quiet"])
def test_output_does_not_depend_on_the_number_of_ranks(on_ranks, model, rows, form):
    given = command(model, rows, "--seed", 3, form)
    [alone] = on_ranks(given)
    assert alone.out.count(b"\n") >= len(ROWS) + 3
    for n in (2, 3):
        ranks = on_ranks(*[given] * n)
        assert [rank.out for rank in ranks] == [alone.out] + [b""] * (n - 1)
        assert [rank.status for rank in ranks] == [alone.status] * n == [1] * n
        errors = [line for line in stderr_lines(ranks) if line.startswith("error")]
        assert sorted(errors) == sorted(e for e in stderr_lines([alone]) if e.startswith("error"))
        if form == "--jsonl":  # rank 0 prints the statistics of all rows
            count = f"{len(ROWS)} rows (2 failed) · "
            [statistics] = [line for line in stderr_lines(ranks) if count in line]
            assert statistics.split(" · ")[1] in alone.err
    assert (
        [json.loads(line)["row"] for line in alone.out.splitlines()]
        == sorted([*range(len(ROWS)), 1, 1, 5])
        if form == "--jsonl"
        else True
    )


@pytest.mark.parametrize("text", ["", "What", "one\ntwo\nthree\nfour\nfive"])
def test_fewer_rows_than_ranks(on_ranks, model, tmp_path, text):
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    given = command(model, path, "-q")
    ranks = on_ranks(*[given] * 3)  # without --seed, all use rank 0's
    assert [rank.status for rank in ranks] == [0] * 3
    assert ranks[0].out.count(b"\n") >= len(text.splitlines())
    assert not any(rank.out for rank in ranks[1:])


def test_random_seed_is_the_same_on_all_ranks(on_ranks, model, rows):
    ranks = on_ranks(*[command(model, rows, "--jsonl")] * 2)
    [seed] = [line.rpartition(" ")[2] for line in stderr_lines(ranks) if " · seed " in line]
    [alone] = on_ranks(command(model, rows, "--jsonl", "--seed", seed))
    assert ranks[0].out == alone.out


def test_torchrun_gives_the_output_of_one_process(on_ranks, model, rows):
    given = [str(one) for one in command(model, rows, "--seed", 3, "--jsonl", "-q")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command_line = [sys.executable, *torchrun, "-m", "tgen", *given]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, env=clean_environment()) as process:
        shared, _ = process.communicate(timeout=900)
    [alone] = on_ranks(given)
    assert shared == alone.out != b""


def test_error_on_all_ranks_is_printed_once(on_ranks, model, rows):
    wrong = {
        "2 ranks were started for a single prompt": ["generate", "-m", model, "-p", "What"],
        "several processes cannot share stdin": command(model, "-"),
        "--chat cannot be combined with --echo": command(model, rows, "--chat", "--echo"),
        "no such option": command(model, rows, "--nothing"),
        "--top-p: invalid value 7.0": command(model, rows, "--top-p", 7),
        "nowhere": command(model / "nowhere", rows),
        "is not a regular file": command(model, os.devnull),
    }
    for words, given in wrong.items():
        ranks = on_ranks(given, given)
        [error] = [line for line in stderr_lines(ranks) if line.startswith("error: ")]
        assert words in error
        assert error in ranks[0].err
        assert ranks[0].status == ranks[1].status != 0
        assert not ranks[0].out


TWO_FOLDERS = """
import os, sys
from tgen.cli.app import run
os.chdir({there!r} if os.environ["RANK"] == "2" else {here!r})
sys.argv[1:] = {arguments}
os._exit(run({arguments}))
"""


def test_difference_between_ranks_ends_all_and_is_printed_by_rank_zero(
    on_ranks, model, rows, tmp_path, tokenizer
):
    there = tmp_path / "there"
    there.mkdir()
    (there / "rows.jsonl").write_text(LINES.replace("crown", "brown"))
    transformer = make_model("llama", vocab_size=tokenizer.vocab_size, seed=1)
    model_dir.save(there / "model", transformer.config, tokenizer, transformer.to_arrays())
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(model, tmp_path / "only here")
    wrong = {
        "the content of rows.jsonl differs": command("model", "rows.jsonl"),
        "the model model differs": command("model", rows),
        "only here": command("only here", rows),
    }
    for words, given in wrong.items():
        arguments = [str(one) for one in given]
        code = TWO_FOLDERS.format(here=str(tmp_path), there=str(there), arguments=arguments)
        ranks = on_ranks(code=code, n=3)
        [error] = [line for line in stderr_lines(ranks) if line.startswith("error: ")]
        assert words in error
        assert error in ranks[0].err
        assert [rank.status for rank in ranks] == [1] * 3
