"""Ranks without torchrun: a process that has loaded torch and the command forks them, as often as
it is asked to.

Each request is a line of JSON on stdin: "arguments", a list for each rank, or "code" and "n", and
"folder", where what they write will lie. The answer is the ranks' exit statuses.
"""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
import torch
from torch.distributed import TCPStore

import tgen.training.parallel
from tgen.cli.app import run
from tgen.runs import session

assert tgen.training.parallel
assert session


def main() -> None:
    faulthandler.enable()  # where it was that a rank crashed
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        works = asked.get("arguments") or [asked["code"]] * asked["n"]
        folder = Path(asked["folder"])
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
        pids = [fork(work, rank, len(works), store.port, folder) for rank, work in enumerate(works)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(json.dumps(ends) + "\n")
        sys.stdout.flush()


def fork(work: object, rank: int, n: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    signal.alarm(100)  # whatever hangs
    for number, name in ((0, os.devnull), (1, folder / f"{rank}.out"), (2, folder / f"{rank}.err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    if n > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    status = 99
    try:
        if isinstance(work, str):
            exec(work, {})
            status = 0
        else:
            sys.argv[1:] = work
            status = run(work)
    except BaseException as error:
        sys.stderr.write(f"raised {error!r}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
