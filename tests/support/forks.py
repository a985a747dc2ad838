"""Fast commands and ranks: forked from a process that has imported torch and the command.

Each request is one JSON object per line on stdin: "arguments", a list per rank, or "code" and "n";
"folder", for the output of the ranks and for their stdin, the file `in`; "cwd", "environment" and
"closed", the number of a stream or null.
The answer is the ranks' exit statuses.

The store has its own process: its threads could hold a lock at the moment of a fork, and the new
rank would wait for that lock forever.
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import tgen.cli.generate.command
import tgen.cli.train.command
import tgen.engine.cpu
import tgen.training.parallel
from tgen.__main__ import main as run_command
from tgen.planning import budget
from tgen.runs import prepare, session

LIMIT = 1500  # seconds until a process that hangs prints where, and exits
# Imported once instead of by each rank.
assert tgen.cli.generate.command
assert tgen.cli.train.command
assert tgen.engine.cpu
assert tgen.training.parallel
assert session


def main() -> None:
    faulthandler.enable()  # shows where a rank crashed
    torch.set_num_threads(1)
    gc.freeze()  # ranks need not look at these objects
    for line in sys.stdin:
        request = json.loads(line)
        n = len(request["arguments"]) or request["n"]
        if n > 1:
            importlib.import_module("torch._dynamo")  # by each rank otherwise
            gc.freeze()
        store, port = fork_store() if n > 1 else (0, 0)
        try:
            pids = [fork(request, rank, n, port) for rank in range(n)]
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        finally:
            if store:
                os.kill(store, signal.SIGKILL)
                os.waitpid(store, 0)
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


def fork_store() -> tuple[int, int]:
    """Host the store, as torchrun does, in a new process; return its process ID and port."""
    receiver, sender = os.pipe()
    if pid := os.fork():
        os.close(sender)
        with open(receiver) as pipe:
            return pid, int(pipe.readline())
    signal.alarm(LIMIT + 60)  # if the server is killed; ranks exit earlier
    for number in (0, 1):  # the server's pipes
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(sender, f"{store.port}\n".encode())
    signal.pause()
    raise SystemExit


def fork(request: dict[str, Any], rank: int, n: int, port: int) -> int:
    """Fork a rank; return its process ID."""
    if pid := os.fork():
        return pid
    status = 99
    try:
        folder = Path(request["folder"])
        for number, name in enumerate(("in", f"{rank}.out", f"{rank}.err")):
            path = folder / name if number or (folder / name).exists() else os.devnull
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | (number and os.O_TRUNC)), number)
        sys.stdin = os.fdopen(0, closefd=False)  # the server's has read ahead
        if (closed := request["closed"]) is not None:  # as Python starts then
            os.close(closed)
            setattr(sys, ("stdin", "stdout", "stderr")[closed], None)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        os.chdir(request.get("cwd") or ".")
        if environment := request.get("environment"):
            os.environ.clear()
            os.environ.update(environment)
        if n > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        # Measuring takes longer than training a tiny model; each rank has its own speed.
        prepare.measure_speed = lambda *_, **__: 2e10 * (1 + rank / 10)  # type: ignore[attr-defined]
        budget.SAMPLE_TOKENS, budget.MEMORIZATION_TOKENS = 8, 24
        budget.MEMORIZATION_SAMPLES = 2
        # xz clears hundreds of megabytes however short the text is.
        prepare.xz_bits_per_byte = lambda *_: 2.0  # type: ignore[attr-defined]
        if code := request["code"]:
            exec(code, {})
        else:
            sys.argv[1:] = request["arguments"][rank]
            run_command()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.stderr.write(f"raised {error!r}\n")
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
