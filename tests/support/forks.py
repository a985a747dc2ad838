"""Fast commands and ranks: forked from a process that has imported torch and the command.

That process is forked from pytest before the first test. A request is a dictionary: "arguments", a
list per rank, or "code" and "n"; "folder", for the output of the ranks and for their stdin, the
file `in`; "cwd", "environment" and "closed", the number of a stream or None.
The answer is the ranks' exit statuses.

The store has its own process: its threads could hold a lock at the moment of a fork, and the new
rank would wait for that lock forever.
"""

import atexit
import faulthandler
import gc
import importlib
import logging
import os
import resource
import runpy
import signal
import sys
import threading
import traceback
import warnings
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

NEEDED = ["tgen.__main__", "tgen.cli.generate.command", "tgen.cli.train.command"]
NEEDED += ["tgen.engine.cpu", "tgen.runs.session", "tgen.training.parallel"]
LIMIT = 1500  # seconds until a process that hangs prints where, and exits


def serve(requests: Connection) -> NoReturn:
    """Fork the commands of requests until the other end is closed; then exit."""
    undo_pytest()
    while True:
        try:
            request = requests.recv()
        except EOFError:
            os._exit(0)
        import_all()
        sys.modules["__main__"] = sys.modules["tgen.__main__"]  # new processes need no pytest
        if "python" in request:
            requests.send(start(request, [recv_handle(requests) for _ in range(3)]))
            continue
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
        requests.send(statuses)


def undo_pytest() -> None:
    """Bring this process to the state of a new Python with PYTHONWARNINGS=default."""
    atexit._clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.root.handlers.clear()
    warnings.simplefilter("default")
    faulthandler.enable()  # shows where a rank crashed


@cache
def import_all() -> None:
    """Import once what commands need."""
    for name in NEEDED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.freeze()  # ranks need not look at these objects


def start(request: dict[str, Any], streams: list[int]) -> int:
    """Start a process that does what Python does with the arguments `python`; return its ID.

    The process between it and this one exits, so that the process of the tests is its parent.
    """
    receiver, sender = os.pipe()
    if not (between := os.fork()):
        if pid := os.fork():
            os.write(sender, str(pid).encode())
            os._exit(0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 65536)
        os._exit(run_python(request))
    os.waitpid(between, 0)
    for descriptor in (sender, *streams):
        os.close(descriptor)
    with open(receiver) as pipe:
        return int(pipe.read())


def run_python(request: dict[str, Any]) -> int:
    """Run code or a module as a new Python does; return its exit status."""
    import torch

    open_streams()
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    assume_speed(0)
    add_own_memory_to_limits()
    kind, program, *sys.argv[1:] = request["python"]
    if not request["safe_path"]:
        sys.path.insert(0, "")
    status: Any = 0
    try:
        if kind == "-m":
            for name in (program, f"{program}.__main__"):
                sys.modules.pop(name, None)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, vars(sys.modules["__main__"]))
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return int(status)


def add_own_memory_to_limits() -> None:
    """Let a program that limits its memory have as much as in a new Python, which is smaller."""
    if sys.platform != "linux":
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    set_limit = resource.setrlimit

    def set_larger_limit(number: int, limits: tuple[int, int]) -> None:
        soft, hard = limits
        if number == resource.RLIMIT_AS and soft != resource.RLIM_INFINITY:
            soft += used
        set_limit(number, (soft, hard))

    resource.setrlimit = set_larger_limit


def assume_speed(rank: int) -> None:
    """Shorten what takes longer than training a tiny model; each rank has its own speed."""
    from tgen.planning import side_work
    from tgen.runs import forgetting, prepare

    forgetting.TEXT_TOKENS = 4  # type: ignore[attr-defined]
    prepare.measure_speed = lambda *_, **__: 2e10 * (1 + rank / 10)  # type: ignore[attr-defined]
    side_work.SAMPLE_TOKENS, side_work.MEMORIZATION_TOKENS = 8, 24
    side_work.MEMORIZATION_SAMPLES = 2
    # xz clears hundreds of megabytes however short the text is.
    prepare.xz_bits_per_byte = lambda *_: 2.0  # type: ignore[attr-defined]


def open_streams() -> None:
    """Read and write the standard streams as a new Python does."""
    streams = ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    for (number, mode, errors), name in zip(streams, ("stdin", "stdout", "stderr"), strict=True):
        stream = os.fdopen(number, mode, 1 if number == 2 else -1, errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def fork_store() -> tuple[int, int]:
    """Host the store, as torchrun does, in a new process; return its process ID and port."""
    receiver, sender = os.pipe()
    if pid := os.fork():
        os.close(sender)
        with open(receiver) as pipe:
            return pid, int(pipe.readline())
    signal.alarm(LIMIT + 60)  # if the server is killed; ranks exit earlier
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
        open_streams()
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
        assume_speed(rank)
        if code := request["code"]:
            exec(code, {})
        else:
            sys.argv[1:] = request["arguments"][rank]
            from tgen.__main__ import main

            main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.stderr.write(f"raised {error!r}\n")
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status)
