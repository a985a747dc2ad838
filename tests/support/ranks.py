"""Fast ranks without torchrun: forked from a process that has imported torch and the command.

Each request is one JSON object per line on stdin: "arguments", a list per rank, or "code" and "n";
and "folder", for the ranks' output. The answer is the ranks' exit statuses.

The store has its own process: its threads could hold a lock at the moment of a fork, and the new
rank would wait for that lock forever.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
import pydantic.functional_validators
import torch
import torch._dynamo
import typer._adapters
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import tgen.cli.train.command
import tgen.training.parallel
from tgen.cli.app import run
from tgen.runs import final_report, prepare, samples, session

# Imported once instead of by each rank.
assert pydantic.functional_validators
assert torch._dynamo
assert typer._adapters
assert tgen.cli.train.command
assert tgen.training.parallel
assert session


def main() -> None:
    faulthandler.enable()  # shows where a rank crashed
    torch.set_num_threads(1)
    gc.freeze()  # ranks need not look at these objects
    for line in sys.stdin:
        request = json.loads(line)
        tasks = request.get("arguments") or [request["code"]] * request["n"]
        folder = Path(request["folder"])
        store, port = fork_store()
        try:
            pids = [fork(task, rank, len(tasks), port, folder) for rank, task in enumerate(tasks)]
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        finally:
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
    signal.alarm(300)  # if the server is killed; ranks exit earlier
    for number in (0, 1):  # the server's pipes
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(sender, f"{store.port}\n".encode())
    signal.pause()
    raise SystemExit


def fork(task: Any, rank: int, n: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    for number, name in ((0, os.devnull), (1, folder / f"{rank}.out"), (2, folder / f"{rank}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.dump_traceback_later(200, exit=True)  # if it hangs; ranks join within 300 s
    if n > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # Measuring takes longer than training a tiny model; each rank has its own speed.
    prepare.measure_speed = lambda *_, **__: 2e10 * (1 + rank / 10)  # type: ignore[attr-defined]
    samples._SAMPLE_TOKENS = final_report._MEMORIZATION_TOKENS = 24
    status = 99
    try:
        if isinstance(task, str):
            exec(task, {})
            status = 0
        else:
            sys.argv[1:] = task
            status = run(task)
    except BaseException as error:
        sys.stderr.write(f"raised {error!r}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
