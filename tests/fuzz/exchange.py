"""One request and its response, as a client sees them, over a connection of `tgen serve` that has
no socket."""

import asyncio
import json
from functools import partial
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from tgen.serve.server import HTTP_OPTIONS, Connection


class Response(NamedTuple):
    """A response; status 0 without one."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def kind(self) -> str:
        """The type of its content, without parameters."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].decode()

    def check(self) -> str:
        """Return its text; raises AssertionError if it is not in its format or says that the server
        failed."""
        text = self.body.decode()
        assert self.status < 500, f"status {self.status}: {text}"
        assert "internal error" not in text, "a stream fails"
        if self.kind == "application/json" and text:
            _load(text)
        elif self.kind == "application/x-ndjson":
            *lines, end = text.split("\n")
            assert not end, f"a line does not end: {end}"
            for line in lines:
                _load(line)
        elif self.kind == "text/event-stream":
            *events, end = text.split("\n\n")
            assert not end, f"an event does not end: {end}"
            for event in events:
                name, _, data = event.partition("data: ")
                assert not name or (name.startswith("event: ") and name.count("\n") == 1), event
                if data != "[DONE]":
                    _load(data)
        return text

    def message(self) -> str:
        """Return the message of an error, in any of the forms."""
        text = self.body.decode()
        error = json.loads(text)["error"] if self.kind == "application/json" and text else text
        return str(error["message"] if isinstance(error, dict) else error)


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=partial(_reject, text))


def _reject(text: str, name: str) -> None:
    raise AssertionError(f"{name} in JSON: {text}")


class _Client(asyncio.Transport):
    """The client's side of a connection, which reads the response as it comes."""

    def __init__(self, method: str) -> None:
        super().__init__({"peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 8000)})
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        self._parser.send(h11.EndOfMessage())
        self.status, self.headers, self.body = 0, dict[bytes, bytes](), b""
        self.done, self.closed = asyncio.Event(), False
        self.error: h11.RemoteProtocolError | None = None  # in the response

    def write(self, data: Any) -> None:
        """Read a part of the response."""
        if data and not self.done.is_set():
            self._parser.receive_data(bytes(data))
            self._read()

    def close(self) -> None:
        """Read the end of the connection."""
        if not self.closed:
            self.closed = True
            if self.status and not self.done.is_set():
                self._parser.receive_data(b"")
                self._read()
            self.done.set()

    abort = close

    def _read(self) -> None:
        while not self.done.is_set():
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError as error:
                self.error = error
                self.done.set()
                return
            if isinstance(event, h11.Response):
                self.status, self.headers = event.status_code, dict(event.headers)
            elif isinstance(event, h11.Data):
                self.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.done.set()
            elif not isinstance(event, h11.InformationalResponse):
                return

    def is_closing(self) -> bool:
        """Return whether the server has closed the connection."""
        return self.closed

    def get_write_buffer_size(self) -> int:
        """Return 0: all is read at once."""
        return 0

    def pause_reading(self) -> None:
        """Do nothing: there are no more bytes."""

    resume_reading = pause_reading


async def exchange(raw: bytes, app: ASGIApp, *, leaves: bool = False) -> Response:
    """Send the bytes of a request, and return the response, with status 0 if the client leaves.

    Raises RemoteProtocolError for a response that is not HTTP.
    """
    config = uvicorn.Config(app, interface="asgi3", **HTTP_OPTIONS)
    config.load()
    state = ServerState()
    client = _Client("HEAD" if raw.startswith(b"HEAD ") else "GET")
    connection = Connection(config, state, {})
    connection.connection_made(client)
    if raw:  # asyncio passes on no empty data
        connection.data_received(raw)
    if leaves:
        for _ in range(len(raw) % 5):
            await asyncio.sleep(0)
    elif connection.cycle is not None or client.closed:  # otherwise, the header is incomplete
        await client.done.wait()
    connection.connection_lost(None)
    while state.tasks:
        await asyncio.wait(state.tasks)
    if leaves:
        return Response(0, {}, b"")
    if client.error is not None:
        raise client.error
    return Response(client.status, client.headers, client.body)
