"""Texts join the batch and leave it; an engine that fails ends the server."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tgen.errors import TgenError
from tgen.generation.sequence import Request
from tgen.loaded_model import LoadedModel
from tgen.serve import server
from tgen.serve.access_log import AccessLog
from tgen.serve.app import ServiceLimits
from tgen.serve.engine_thread import EngineThread, Job, PromptScores
from tgen.serve.http_error import HttpError
from tgen.serve.models import ModelSettings, describe_source

_Test = Callable[[EngineThread], Coroutine[Any, Any, None]]


def run(model: Any, test: _Test, **sizes: int) -> None:
    """Run a test with an engine in an event loop; a lost text fails instead of waiting forever."""

    async def main() -> None:
        engine = EngineThread(model, **{"batch_size": 1, "queue_size": 9} | sizes)
        try:
            async with asyncio.timeout(900):
                await test(engine)
        finally:
            engine.stop()
            engine.join(900)

    asyncio.run(main())


def submit(engine: EngineThread, *requests: Request, n_top: int | None = None) -> Job:
    job = Job(requests, stream=True, n_top=n_top)
    engine.reserve(len(requests))
    engine.submit(job)
    return job


async def finish(job: Job) -> list[int]:
    """Return the ids of the job's only text."""
    events = await job.events()
    while not events[-1][1].last:
        events += await job.events()
    return [token.id for _, token in events]


async def read_all(job: Job, n: int) -> list[Any]:
    """Return the first n events of a job."""
    events = await job.events()
    while len(events) < n:
        events += await job.events()
    return [event for _, event in events]


async def read_on(job: Job) -> None:
    while True:
        await job.events()


@pytest.fixture
def short(loaded: LoadedModel) -> Request:
    return loaded.request([5, 6], loaded.sampling({"max_new_tokens": 3, "seed": 1}))


@pytest.fixture
def endless(loaded: LoadedModel) -> Request:
    """Return a request for a text that no test waits for: a string of it does not come."""
    never = {"max_new_tokens": 10**9, "require": "q" * 60}
    return Request([5, 6], loaded.sampling(never))


def test_cancelled_text_leaves_the_batch(
    loaded: LoadedModel, short: Request, endless: Request
) -> None:
    async def test(engine: EngineThread) -> None:
        expected = await finish(submit(engine, short))
        running = submit(engine, endless)
        await running.events()
        waiting, last = submit(engine, endless, endless), submit(engine, short)
        assert (engine.n_running, engine.n_waiting) == (1, 3)
        engine.cancel(waiting)
        assert engine.n_waiting == 1
        engine.cancel(running)
        assert engine.n_running == 0
        assert await finish(last) == expected
        engine.cancel(running)
        engine.cancel(last)
        assert await finish(submit(engine, short)) == expected

    run(loaded, test)


def test_draining_keeps_what_has_started(
    loaded: LoadedModel, short: Request, endless: Request
) -> None:
    async def test(engine: EngineThread) -> None:
        job = submit(engine, short, endless)  # the second text waits for the first
        await job.events()
        other = submit(engine, short)
        engine.drain()
        with pytest.raises(HttpError) as error:
            await other.events()
        assert error.value.status == 503
        with pytest.raises(HttpError):
            engine.reserve(1)
        assert engine.n_running + engine.n_waiting > 0
        engine.stop()
        with pytest.raises(HttpError):
            await read_on(job)
        engine.join(900)
        assert engine.n_running + engine.n_waiting == 0

    run(loaded, test)


def test_prompts_are_scored_while_texts_run(
    loaded: LoadedModel, short: Request, endless: Request, caplog: pytest.LogCaptureFixture
) -> None:
    none = loaded.request([5, 6, 7], loaded.sampling({"max_new_tokens": 0}))

    async def test(engine: EngineThread) -> None:
        expected = await finish(submit(engine, short))
        running = submit(engine, endless)
        await running.events()
        engine.cancel(submit(engine, none, none, n_top=1))
        first, second = await read_all(submit(engine, none, none, n_top=1), 2)
        assert first == second == PromptScores(loaded.score_prompt([5, 6, 7], 1), last=True)
        assert first.tokens is second.tokens  # computed once
        scores, *tokens = await read_all(submit(engine, short, n_top=0), 4)
        assert scores == PromptScores(loaded.score_prompt([5, 6], 0), last=False)
        assert [token.id for token in tokens] == expected
        assert await read_all(submit(engine, none), 1) == [PromptScores([], last=True)]
        bad = none._replace(prompt=[5, 10**6])
        with pytest.raises(HttpError) as error:
            await submit(engine, bad, n_top=1).events()
        assert error.value.status == 500
        assert await finish(submit(engine, short)) == expected
        assert engine.n_running == 1
        await running.events()

    run(loaded, test, batch_size=2)
    assert "a text failed" in caplog.text


class Broken:
    """A model whose engine fails at its second token."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def complete(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        tokens = self.model.complete(*arguments, **options)
        yield next(tokens)
        raise RuntimeError("planted")


def test_failing_engine_answers_everyone_and_ends_the_server(
    loaded: LoadedModel, short: Request, endless: Request, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: EngineThread) -> None:
        jobs = [submit(engine, endless), submit(engine, short)]
        for job in jobs:
            with pytest.raises(HttpError) as error:
                await finish(job)
            assert error.value.status == 500
        with pytest.raises(HttpError) as error:
            engine.reserve(1)
        assert error.value.code == "engine_failed"

    run(Broken(loaded), test)
    assert "planted" in caplog.text

    class Useless(Broken):
        def complete(self, *_: Any, **__: Any) -> Iterator[Any]:
            raise RuntimeError("planted")

    source = describe_source("m", loaded.bundle.path, None, None)
    settings = server.ServerSettings(
        models=ModelSettings(batch_size=1, queue_size=1),
        drain_seconds=9,
        limits=ServiceLimits(body_bytes=9, body_seconds=9, request_seconds=9),
    )
    useless: Any = Useless(loaded)
    with server.listen("127.0.0.1", 0) as sock, pytest.raises(TgenError, match="engine failed"):
        server.serve([source], lambda _: useless, sock, settings, AccessLog("off", print))
