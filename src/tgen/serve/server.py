"""The server process: socket, connections, signals, and the order in which everything ends.

The first SIGTERM or Ctrl-C starts to drain: running texts end, new requests get 503. The server
exits when no text is left or the time for it is over; a second signal ends it at once. Slow clients
cannot hold a connection open; uvicorn itself waits for them forever.
"""

import asyncio
import errno
import hashlib
import ipaddress
import logging
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tgen.checkpoint.model_dir import digest
from tgen.errors import ModelError, TgenError
from tgen.loaded_model import LoadedModel
from tgen.serve.app import Service, ServiceLimits
from tgen.serve.engine_thread import EngineThread
from tgen.version import __version__

IDLE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 2  # for responses that are still being written at the end
_MAX_CONNECTIONS = 600  # more than requests that may be open, see `app`
_BACKLOG = 256


class Connection(H11Protocol):
    """A connection that is cut when nothing has moved from one check to the next.

    That is the case while a request's header does not arrive, and while the client does not read
    the response. The application limits the time for the body.
    """

    idle_seconds = IDLE_SECONDS  # between checks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch."""
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:  # make room for one that may ask
            others = (c for c in self.connections if isinstance(c, Connection) and c is not self)
            next((c for c in others if not c.is_answering), self).transport.abort()
        self._last_state: tuple[Any, ...] = ()
        self._watch = self.loop.call_later(self.idle_seconds, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to watch."""
        self._watch.cancel()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        """Whether a response has begun or is being computed."""
        return self.cycle is not None and not self.cycle.response_complete

    def _check(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        state = (self.cycle, unsent)
        if state == self._last_state and (unsent or not self.is_answering):
            self.transport.abort()
            return
        self._last_state = state
        self._watch = self.loop.call_later(self.idle_seconds, self._check)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server runs; `limits` are those of one request."""

    name: str  # of the model, in the API
    batch_size: int
    queue_size: int  # texts
    drain_seconds: float
    limits: ServiceLimits
    api_key: str | None = None


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; port 0 is any free port.

    Raises TgenError if the address is in use or is not this machine's.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        in_use = getattr(error, "errno", None) == errno.EADDRINUSE
        hint = "choose another --port" if in_use else "set --host to an address of this machine"
        raise TgenError(f"cannot listen on {host}:{port}: {reason}", hint) from None


def is_loopback(sock: socket.socket) -> bool:
    """Return whether only this machine can reach the socket."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url(sock: socket.socket) -> str:
    """Return the address of the API's root, for this machine."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warm_up(model: LoadedModel) -> None:
    """Compute what the first request would otherwise wait for."""
    _ = model.vocabulary, model.ngrams, model.defaults
    with suppress(ModelError):  # without a template, only chats are errors
        _ = model.chat_format


def serve(model: LoadedModel, sock: socket.socket, settings: ServerSettings) -> None:
    """Serve until a signal ends it; raises TgenError if the engine failed."""
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    asyncio.run(_serve(model, sock, settings))


async def _serve(model: LoadedModel, sock: socket.socket, settings: ServerSettings) -> None:
    server: _Server
    engine = EngineThread(
        model,
        batch_size=settings.batch_size,
        queue_size=settings.queue_size,
        on_end=lambda: server.finish(),
    )
    service = Service(
        model,
        engine,
        settings.limits,
        name=settings.name,
        fingerprint=_fingerprint(model),
        api_key=settings.api_key,
        allowed_hosts=_local_hosts(sock) if is_loopback(sock) else None,
    )
    config = uvicorn.Config(
        service,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config, engine, service, settings.drain_seconds)
    try:
        await server.serve([sock])
    finally:
        engine.stop()
        service.close()
        await asyncio.to_thread(engine.join, _CLOSE_SECONDS)
    if engine.failed:
        raise TgenError("the engine failed", "read the traceback above, and start the server again")


class _Server(uvicorn.Server):
    """uvicorn's server, which drains before it closes its socket."""

    def __init__(
        self, config: uvicorn.Config, engine: EngineThread, service: Service, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._engine, self._service, self._drain_seconds = engine, service, drain_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain at the first one, end at the second."""
        del sig, frame
        self._loop.call_soon_threadsafe(self._on_signal)

    def finish(self) -> None:
        """End all texts and close the server."""
        self._engine.stop()
        self.should_exit = True

    def _on_signal(self) -> None:
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        else:
            self.finish()
            self.force_exit = True

    async def _drain(self) -> None:
        self._service.drain()
        end = time.monotonic() + self._drain_seconds
        while self._engine.n_running + self._engine.n_waiting and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        self.finish()


def _fingerprint(model: LoadedModel) -> str:
    """Return a name for everything that a text depends on besides the request."""
    engine = model.engine
    facts = (digest(model.bundle), __version__, engine.name, engine.dtype, engine.cache_dtype)
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _local_hosts(sock: socket.socket) -> frozenset[str]:
    return frozenset({"localhost", "127.0.0.1", "[::1]", sock.getsockname()[0]})
