"""Run tests in processes forked from the one that collected them, which has imported all they need.

A worker takes the next module when it has finished one. It sends each test's ID, then its reports,
and None at the end.
"""

import io
import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest

from support.command import fork_server
from support.forks import import_all

# Modules that are one for the workers: to start a browser takes seconds.
WITH_BROWSER = ["test_live_page", "test_browser", "test_notebook"]
Modules = Sequence[Sequence[pytest.Item]]


def run_in_workers(session: pytest.Session, n: int) -> None:
    """Run the tests of `session` in `n` processes. One that dies fails the test it was in."""
    import_all()
    for name in ("torch._dynamo", "transformers.modeling_utils", "peft"):  # used later
        with suppress(ImportError):
            import_module(name)
    context = multiprocessing.get_context("fork")
    modules = [list(items) for _, items in groupby(session.items, key=_group)]
    numbers = context.SimpleQueue()
    for number in [*range(len(modules)), *[None] * n]:
        numbers.put(number)
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: dict[Any, Any] = {}
    for i in range(n):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (session, modules, numbers, sender, folder / f"worker{i}")
        workers[receiver] = context.Process(target=_work, args=arguments)
        workers[receiver].start()
        sender.close()
    running = dict.fromkeys(workers, "tests")
    try:
        while workers:
            for ready in wait(list(workers)):
                pipe: Any = ready
                try:
                    message = pipe.recv()
                except EOFError:
                    worker = workers.pop(pipe)
                    worker.join()
                    if running[pipe] is not None:
                        _report_end(session, running[pipe], worker.exitcode)
                    continue
                if isinstance(message, dict):
                    _report(session, message)
                else:
                    running[pipe] = message
    finally:
        for worker in workers.values():
            worker.kill()  # a test may have changed what SIGTERM does
            worker.join()


def _group(item: pytest.Item) -> object:
    return "browser" if item.path.stem in WITH_BROWSER else item.path


def _report_end(session: pytest.Session, test: str, status: int) -> None:
    words = f"the process ended with {status} during this test"
    place = (test.partition("::")[0], None, test)
    report = pytest.TestReport(test, place, {}, "failed", words, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _report(session: pytest.Session, data: dict[str, Any]) -> None:
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=data)
    hook.pytest_runtest_logreport(report=report)
    if report.when == "teardown":
        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


class _Sender:
    """A plugin that sends reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)


def _work(
    session: pytest.Session,
    modules: Modules,
    numbers: "SimpleQueue[int | None]",
    connection: Connection,
    folder: Path,
) -> None:
    config = session.config
    config.get_terminal_writer()._file = io.StringIO()  # the first process writes
    config.pluginmanager.register(_Sender(config, connection))
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    fork_server()
    items = chain.from_iterable(modules[number] for number in iter(numbers.get, None))
    for item, following in pairwise(chain(items, [None])):
        connection.send(item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    connection.send(None)
