"""A slow client holds neither a connection nor a request for long."""

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tgen.errors import TgenError
from tgen.loaded_model import LoadedModel
from tgen.serve.app import Service, ServiceLimits
from tgen.serve.models import ModelSettings, ServedModels, describe_source
from tgen.serve.server import HTTP_OPTIONS, Connection, _allow_descriptors

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "idle_seconds", 0.02)


async def talk_to(app: Any, talk: Talk, connection: type[Connection] = Connection) -> None:
    """Connect to an application on a real port."""
    config = uvicorn.Config(app, http=connection, ws="none", lifespan="off", log_config=None)
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: connection(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await talk(reader, writer)
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_connection_whose_header_does_not_arrive_is_cut(sent: bytes) -> None:
    async def app(_: Any, __: Any, ___: Any) -> None:
        raise AssertionError("no request has arrived")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""

    asyncio.run(talk_to(app, talk))


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_malformed_chunks_are_answered_whatever_the_method(method: bytes) -> None:
    async def app(_: Any, receive: Any, __: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop, errors = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        writer.write(method + b" / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        assert errors == []

    asyncio.run(talk_to(app, talk))


def test_connection_of_a_client_that_does_not_read_is_cut() -> None:
    gone = asyncio.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

        writing = asyncio.ensure_future(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        gone.set()

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await gone.wait()

    asyncio.run(talk_to(app, talk))


def test_slow_answers_keep_their_connection() -> None:
    checked, n_checks = asyncio.Event(), 0

    class Counting(Connection):
        def _check(self) -> None:
            nonlocal n_checks
            n_checks += 1
            super()._check()
            if n_checks == 5:
                checked.set()

    async def app(_: Any, __: Any, send: Any) -> None:
        await checked.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"done\r\n0\r\n\r\n")

    asyncio.run(talk_to(app, talk, Counting))


def test_idle_connections_take_further_requests_longer_than_clients_keep_them() -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"done\r\n0\r\n\r\n")
            await asyncio.sleep(10 * Connection.idle_seconds)
        writer.write(b"GET /")  # the next header has begun, and does not arrive
        with suppress(ConnectionResetError):
            assert await reader.read() == b""

    asyncio.run(talk_to(app, talk))
    assert HTTP_OPTIONS["timeout_keep_alive"] > 90  # seconds, of Go's clients


def test_new_connections_take_the_place_of_the_oldest_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Connection, "idle_seconds", 900)
    monkeypatch.setattr(Connection, "max_connections", 3)

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")
        idle = [await asyncio.open_connection(*address) for _ in range(9)]
        idle.append(await asyncio.open_connection(*address))
        for reader, newest in idle[-2:]:
            newest.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"done\r\n0\r\n\r\n")
        for _, other in idle:
            other.close()

    asyncio.run(talk_to(app, talk))


def _serve(loaded: LoadedModel) -> ServedModels:
    """Return the models of a server that has one."""
    source = describe_source("tiny", loaded.bundle.path, None, None)
    models = ServedModels([source], lambda _: loaded, ModelSettings(batch_size=2, queue_size=8))
    models.add("tiny", loaded, "")
    return models


def test_more_requests_than_may_be_open_are_refused(loaded: LoadedModel) -> None:
    async def main() -> None:
        models = _serve(loaded)
        limits = ServiceLimits(body_bytes=999, body_seconds=9, request_seconds=9, open_requests=0)
        service = Service(models, limits)
        status, body = await _call(service, b'{"prompt": "x"}', whole=True)
        assert status == 503
        assert b'"overloaded"' in body
        status, body = await _call(service, b"", whole=True, path="/health")
        assert status == 200
        models.stop()
        models.join(900)
        service.close()

    asyncio.run(main())


async def _call(
    service: Service, body: bytes, *, whole: bool, path: str = "/v1/completions"
) -> tuple[int, bytes]:
    """Return the status and the body of an answer to a client that stays connected."""
    parts = [{"type": "http.request", "body": body, "more_body": not whole}]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    method = "POST" if body else "GET"
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    await service(scope | {"query_string": b"", "root_path": ""}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_bodies_and_texts_have_a_deadline(loaded: LoadedModel) -> None:
    async def main() -> None:
        models = _serve(loaded)
        limits = ServiceLimits(
            max_tokens=2000, body_bytes=1000, body_seconds=0.01, request_seconds=0.01
        )
        service = Service(models, limits)
        status, body = await _call(service, b'{"prompt"', whole=False)
        assert status == 408
        for more in (b"", b', "stream": true'):
            request = b'{"prompt": "x", "n": 8, "max_tokens": 2000' + more + b"}"
            status, body = await _call(service, request, whole=True)
            assert status == (200 if b"data" in body else 503)
            assert b'"timeout"' in body
            assert b"[DONE]" not in body
        while models.n_running + models.n_waiting:
            await asyncio.sleep(0)
        models.stop()
        models.join(900)
        service.close()

    asyncio.run(main())


def test_the_limit_of_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 4096), (4096, 4096), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)]
    changes = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: changes.append(limit))
    for limit in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: limit)
        _allow_descriptors(700)
    assert changes == [(700, 4096)]

    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(TgenError, match="--max-open needs 700 open files"):
        _allow_descriptors(700)
