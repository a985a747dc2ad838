"""The process group: an error on any rank ends all ranks and is printed once."""

import socket

import pytest

from tgen import distributed
from tgen.errors import TgenError, UsageError

FAILING_RANK = """
import os
from tgen.distributed import barrier, join_process_group
from tgen.errors import ModelError, RankError
def print_error(message, hint):
    print("printed", message, hint, flush=True)
try:
    with join_process_group(print_error) as ranks:
        barrier()
        if ranks.rank == {rank}:
            {action}
        barrier()
except RankError as error:
    print("ended", error, error.exit_status, flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_error_ends_all_ranks_with_its_message(on_ranks, rank):
    code = FAILING_RANK.format(rank=rank, action='raise ModelError("it is damaged", "fix it")')
    ranks = on_ranks(code=code, n=3)
    ended = "ended it is damaged 1\n"
    assert [r.out.decode() for r in ranks] == [
        "printed it is damaged fix it\n" + ended,
        ended,
        ended,
    ]


def test_error_of_the_system_names_its_file(on_ranks):
    first, *_ = on_ranks(code=FAILING_RANK.format(rank=1, action='open("/no/file")'), n=2)
    assert first.out.decode().startswith("printed /no/file: No such file or directory")


def test_bug_is_raised_on_its_launch(on_ranks):
    ranks = on_ranks(code=FAILING_RANK.format(rank=1, action='raise KeyError("oops")'), n=3)
    assert ranks[1].err == "raised KeyError('oops')\n"
    assert ranks[0].out.decode().startswith("printed rank 1: KeyError: 'oops' ")
    assert ranks[2].out.decode() == "ended rank 1: KeyError: 'oops' 70\n"


def test_killed_rank_ends_the_others(on_ranks):
    ranks = on_ranks(code=FAILING_RANK.format(rank=1, action="os.kill(os.getpid(), 9)"), n=3)
    assert ranks[1].status == -9
    assert "printed a rank ended without an error message" in ranks[0].out.decode()
    assert ranks[2].out.decode() == "ended a rank ended without an error message 1\n"


def test_closed_stdout_is_not_an_error_on_any_rank(on_ranks):
    closed = "from tgen.cli.streams import StdoutClosedError; raise StdoutClosedError"
    ranks = on_ranks(code=FAILING_RANK.format(rank=0, action=closed), n=2)
    assert ranks[0].err == "raised StdoutClosedError()\n"
    assert ranks[1].out.decode().endswith(" 0\n")


SILENT_RANK = """
from datetime import timedelta
import torch
from tgen.distributed import barrier, join_process_group, process_group, short_timeout
from tgen.errors import RankError
process_group._STEP_TIMEOUT = timedelta(seconds=1)
try:
    with join_process_group(lambda message, hint: print("printed", message, flush=True)) as ranks:
        barrier()
        with short_timeout():
            if ranks.rank:
                torch.distributed.recv(torch.zeros(1), 0)  # never sent
            barrier()
except RankError as error:
    print("ended", error, flush=True)
"""


def test_a_rank_that_hangs_in_a_step_ends_all_ranks(on_ranks):
    ranks = on_ranks(code=SILENT_RANK, n=2)
    message = "a rank did not answer within 1 s\n"
    assert [r.out.decode() for r in ranks] == [
        f"printed {message}ended {message}",
        f"ended {message}",
    ]


STORE_TIMEOUT = """
import torch.distributed as dist
from tgen.distributed import barrier, join_process_group
with join_process_group():
    barrier()  # a rank that leaves at once may break the connection that the other still makes
    _, store = dist.distributed_c10d._world.pg_map[dist.group.WORLD]
    print(store.timeout.total_seconds())
"""


def test_group_store_waits_for_slow_ranks(on_ranks):
    """NCCL's first collective waits with the store's timeout."""
    for rank in on_ranks(code=STORE_TIMEOUT, n=2):
        assert float(rank.out) >= 60


WAITING_RANK = """
import faulthandler, os, signal
from tgen.distributed import join_process_group, process_group
from tgen.errors import TgenError
faulthandler.dump_traceback_later(900, exit=True)
signal.signal(signal.SIGALRM, signal.default_int_handler)
def print_status(text):
    print(text)
    signal.setitimer(signal.ITIMER_REAL, {signal})
process_group._NOTICE_AFTER_SECONDS = 0.0
if os.environ["RANK"] == "0":
    try:
        with join_process_group(print_status=print_status, join_seconds={seconds}):
            pass
    except (KeyboardInterrupt, TgenError) as error:
        print(repr(error))
"""


def test_waiting_for_ranks_is_printed_and_interruptible(on_ranks):
    first, *_ = on_ranks(code=WAITING_RANK.format(seconds=1e6, signal=0.2), n=3)
    assert first.out.decode() == "waiting for rank 1, 2 of 3\nKeyboardInterrupt()\n"
    first, *_ = on_ranks(code=WAITING_RANK.format(seconds=2, signal=1e3), n=3)
    assert "rank 1, 2 of 3 did not join within 2 s" in first.out.decode()


def test_missing_ranks_and_a_port_in_use_are_errors(monkeypatch):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (variables | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TgenError, match=f"the port of 127.0.0.1:{port} is in use"):
            join_within(0.2)
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(TgenError, match=r"rank 1 of 2 did not join within 0\.2 s"):
        join_within(0.2)


def join_within(seconds):
    with distributed.join_process_group(join_seconds=seconds):
        pass


@pytest.mark.parametrize(("name", "value"), [("RANK", "two"), ("RANK", "2"), ("LOCAL_RANK", "9")])
def test_invalid_variables_are_errors(monkeypatch, name, value):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(key, "1" if key == "RANK" else "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=value):
        distributed.ranks()


OTHER_COUNTS = """
import os
from tgen.distributed import barrier, join_process_group
os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
with join_process_group(join_seconds=20):
    barrier()
    print("joined")
"""


def test_machines_that_count_restarts_differently_join(on_ranks):
    assert [rank.out for rank in on_ranks(code=OTHER_COUNTS, n=2)] == [b"joined\n"] * 2
