"""Rows shared out over ranks are the rows of one process, and what goes wrong is told once."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from support.command import clean_environment
from support.models import make_model
from tgen import distributed
from tgen.checkpoint import model_dir
from tgen.errors import TgenError, UsageError

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


def told(ranks):
    """What all ranks together said, in lines."""
    return [line for rank in ranks for line in rank.err.splitlines()]


@pytest.mark.parametrize("form", ["--jsonl", "--quiet"])
def test_any_number_of_ranks_writes_the_same_bytes(on_ranks, model, rows, form):
    given = command(model, rows, "--seed", 3, form)
    [alone] = on_ranks(given)
    assert alone.out.count(b"\n") >= len(ROWS) + 3
    for n in (2, 3):
        ranks = on_ranks(*[given] * n)
        assert [rank.out for rank in ranks] == [alone.out] + [b""] * (n - 1)
        assert [rank.status for rank in ranks] == [alone.status] * n == [1] * n
        errors = [line for line in told(ranks) if line.startswith("error")]
        assert sorted(errors) == sorted(e for e in told([alone]) if e.startswith("error"))
        if form == "--jsonl":  # the commentary is rank 0's, of all rows
            count = f"{len(ROWS)} rows · "
            [said] = [line for line in told(ranks) if count in line]
            assert said.split(" · ")[1] in alone.err
    assert (
        [json.loads(line)["row"] for line in alone.out.splitlines()]
        == sorted([*range(len(ROWS)), 1, 1, 5])
        if form == "--jsonl"
        else True
    )


@pytest.mark.parametrize("text", ["", "What", "one\ntwo\nthree\nfour\nfive"])
def test_there_may_be_fewer_rows_than_ranks(on_ranks, model, tmp_path, text):
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    given = command(model, path, "-q")
    ranks = on_ranks(*[given] * 3)  # without a seed: rank 0's counts
    assert [rank.status for rank in ranks] == [0] * 3
    assert ranks[0].out.count(b"\n") >= len(text.splitlines())
    assert not any(rank.out for rank in ranks[1:])


def test_a_fresh_seed_is_the_same_on_all_ranks(on_ranks, model, rows):
    ranks = on_ranks(*[command(model, rows, "--jsonl")] * 2)
    [seed] = [line.rpartition(" ")[2] for line in told(ranks) if " · seed " in line]
    [alone] = on_ranks(command(model, rows, "--jsonl", "--seed", seed))
    assert ranks[0].out == alone.out


def test_torchrun_itself(on_ranks, model, rows):
    given = [str(one) for one in command(model, rows, "--seed", 3, "--jsonl", "-q")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shared = subprocess.run(
        [sys.executable, *torchrun, "-m", "tgen", *given],
        capture_output=True,
        env=clean_environment(),
        check=False,
        timeout=100,
    )
    [alone] = on_ranks(given)
    assert shared.stdout == alone.out != b""


def test_what_is_wrong_on_all_ranks_is_told_once(on_ranks, model, rows):
    wrong = {
        "there are 2 ranks, and one prompt": ["generate", "-m", model, "-p", "What"],
        "stdin cannot be shared by ranks": command(model, "-"),
        "--chat does not go with --echo": command(model, rows, "--chat", "--echo"),
        "no such option": command(model, rows, "--nothing"),
        "--top-p is 7.0": command(model, rows, "--top-p", 7),
        "nowhere": command(model / "nowhere", rows),
        "is not a regular file": command(model, os.devnull),
    }
    for words, given in wrong.items():
        ranks = on_ranks(given, given)
        [error] = [line for line in told(ranks) if line.startswith("error: ")]
        assert words in error
        assert error in ranks[0].err
        assert ranks[0].status == ranks[1].status != 0
        assert not ranks[0].out


ELSEWHERE = """
import os, sys
from tgen.cli.app import run
os.chdir({there!r} if os.environ["RANK"] == "2" else {here!r})
sys.argv[1:] = {arguments}
os._exit(run({arguments}))
"""


def test_what_is_wrong_on_one_rank_ends_all_and_is_told_by_the_first(
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
        code = ELSEWHERE.format(here=str(tmp_path), there=str(there), arguments=arguments)
        ranks = on_ranks(code=code, n=3)
        [error] = [line for line in told(ranks) if line.startswith("error: ")]
        assert words in error
        assert error in ranks[0].err
        assert [rank.status for rank in ranks] == [1] * 3


JOINED = """
import os
from tgen.distributed import barrier, join_process_group
from tgen.errors import ModelError, RankError
try:
    with join_process_group(lambda message, hint: print("told", message, hint, flush=True)) as mine:
        barrier()
        if mine.rank == {rank}:
            {what}
        barrier()
except RankError as error:
    print("ended", error, error.exit_status, flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_ends_all_ranks_with_its_message(on_ranks, rank):
    code = JOINED.format(rank=rank, what='raise ModelError("it is damaged", "mend it")')
    ranks = on_ranks(code=code, n=3)
    ended = "ended it is damaged 1\n"
    assert [r.out.decode() for r in ranks] == ["told it is damaged mend it\n" + ended, ended, ended]


def test_a_bug_is_raised_where_it_is(on_ranks):
    ranks = on_ranks(code=JOINED.format(rank=1, what='raise KeyError("oops")'), n=3)
    assert ranks[1].err == "raised KeyError('oops')\n"
    assert ranks[0].out.decode().startswith("told rank 1: KeyError: 'oops' ")
    assert ranks[2].out.decode() == "ended rank 1: KeyError: 'oops' 70\n"


def test_a_rank_that_is_killed_ends_the_others(on_ranks):
    ranks = on_ranks(code=JOINED.format(rank=1, what="os.kill(os.getpid(), 9)"), n=3)
    assert ranks[1].status == -9
    assert "told a rank has ended without a word" in ranks[0].out.decode()
    assert ranks[2].out.decode() == "ended a rank has ended without a word 1\n"


def test_a_reader_that_leaves_is_no_error_on_any_rank(on_ranks):
    gone = "from tgen.cli.console import StdoutClosedError; raise StdoutClosedError"
    ranks = on_ranks(code=JOINED.format(rank=0, what=gone), n=2)
    assert ranks[0].err == "raised StdoutClosedError()\n"
    assert ranks[1].out.decode().endswith(" 0\n")


WAITING = """
import faulthandler, os, signal
from tgen.distributed import join_process_group, process_group
from tgen.errors import TgenError
faulthandler.dump_traceback_later(60, exit=True)
signal.signal(signal.SIGALRM, signal.default_int_handler)
def note(text):
    print(text)
    signal.setitimer(signal.ITIMER_REAL, {signal})
process_group._NOTED_AFTER = 0.0
if os.environ["RANK"] == "0":
    try:
        with join_process_group(note=note, join_seconds={seconds}):
            pass
    except (KeyboardInterrupt, TgenError) as error:
        print(repr(error))
"""


def test_whoever_waits_for_ranks_says_so_and_sees_a_signal(on_ranks):
    first, *_ = on_ranks(code=WAITING.format(seconds=1e6, signal=0.2), n=3)
    assert first.out.decode() == "waiting for rank 1, 2 of 3\nKeyboardInterrupt()\n"
    first, *_ = on_ranks(code=WAITING.format(seconds=2, signal=1e3), n=3)
    assert "rank 1, 2 of 3 ranks has not come within 2 s" in first.out.decode()


def test_ranks_that_do_not_come_and_a_port_that_is_taken_are_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TgenError, match=f"the port of 127.0.0.1:{port} is taken"):
            joined_for(0.2)
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(TgenError, match=r"rank 1 of 2 ranks has not come within 0\.2 s"):
        joined_for(0.2)


def joined_for(seconds):
    with distributed.join_process_group(join_seconds=seconds):
        pass


@pytest.mark.parametrize(("name", "value"), [("RANK", "two"), ("RANK", "2"), ("LOCAL_RANK", "9")])
def test_variables_that_make_no_sense(monkeypatch, name, value):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "1" if key == "RANK" else "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=value):
        distributed.ranks()
