"""The server process: socket, connections, signals, and the order in which everything ends.

The first SIGTERM or Ctrl-C starts to drain: running texts end, new requests get 503. The server
exits when no text is left or the time for it is over; a second signal ends it at once. Slow clients
cannot hold a connection open; uvicorn itself waits for them forever.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from tgen.errors import TgenError
from tgen.loaded_model import LoadedModel
from tgen.serve.access_log import AccessLog
from tgen.serve.app import Service, ServiceLimits
from tgen.serve.models import ModelSettings, ModelSource, ServedModels, warm_up

IDLE_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 120  # clients and proxies close idle connections first, mostly by 90
_POLL_SECONDS = 0.05
HTTP_OPTIONS: dict[str, Any] = {  # of uvicorn
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
}
_CLOSE_SECONDS = 2  # for responses that are still being written at the end
_SPARE_CONNECTIONS = 88  # more than requests that may be open, so that /health is reachable
_OWN_DESCRIPTORS = 100  # files and pipes of the process
_BACKLOG = 256


class Connection(H11Protocol):
    """A connection that is cut when nothing has moved from one check to the next.

    That is the case while a request's header does not arrive, and while the client does not read
    the response. The application limits the time for the body. Between two requests, uvicorn's
    timeout counts.
    """

    idle_seconds = IDLE_SECONDS  # between checks
    max_connections = 600

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch."""
        super().connection_made(transport)
        self._opened = self.loop.time()
        if len(self.connections) > self.max_connections:  # make room for one that may ask
            others = (c for c in self.connections if isinstance(c, Connection) and c is not self)
            idle = (c for c in others if not c.is_answering)
            min(idle, key=lambda c: c._opened, default=self).transport.abort()
        self._last_state: tuple[Any, ...] = ()
        self._watch = self.loop.call_later(self.idle_seconds, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to watch."""
        self._watch.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request. That of a HEAD has no body, which uvicorn would send."""
        try:
            super().send_400_response(msg)
        except LocalProtocolError:
            self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether a response has begun or is being computed."""
        return self.cycle is not None and not self.cycle.response_complete

    def _check(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        state = (self.cycle, unsent, self.timeout_keep_alive_task)
        is_waited_for = self.is_answering or self.timeout_keep_alive_task is not None
        if state == self._last_state and (unsent or not is_waited_for):
            self.transport.abort()
            return
        self._last_state = state
        self._watch = self.loop.call_later(self.idle_seconds, self._check)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server; `limits` apply to each request."""

    models: ModelSettings
    drain_seconds: float
    limits: ServiceLimits
    api_key: str | None = None
    origins: Collection[str] = ()  # of web pages
    shows_sources: bool = False  # also to other machines


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


def serve(
    sources: Sequence[ModelSource],
    load: Callable[[ModelSource], LoadedModel],
    sock: socket.socket,
    settings: ServerSettings,
    log: AccessLog,
    started: Callable[[], None] = lambda: None,
) -> bool:
    """Serve until a signal ends it; return True if a second signal forced the end: then do not
    wait for threads that still compute. Raises TgenError if the engine failed.

    A single model is loaded first, several when they are needed; then `started` is called.
    """
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    first = None
    if len(sources) == 1:
        model = load(sources[0])
        first = model, warm_up(model)
    started()
    return asyncio.run(_serve(sources, load, first, sock, settings, log))


async def _serve(
    sources: Sequence[ModelSource],
    load: Callable[[ModelSource], LoadedModel],
    first: tuple[LoadedModel, str] | None,
    sock: socket.socket,
    settings: ServerSettings,
    log: AccessLog,
) -> bool:
    server: _Server
    models = ServedModels(sources, load, settings.models, on_failure=lambda: server.finish())
    if first:
        models.add(sources[0].name, *first)
    service = Service(
        models,
        settings.limits,
        api_key=settings.api_key,
        allowed_hosts=_local_hosts(sock) if is_loopback(sock) else None,
        origins=settings.origins,
        log=log,
        shows_sources=settings.shows_sources or is_loopback(sock),
    )
    n_connections = settings.limits.open_requests + _SPARE_CONNECTIONS
    _allow_descriptors(n_connections + _OWN_DESCRIPTORS)
    config = uvicorn.Config(
        service,
        http=type("LimitedConnection", (Connection,), {"max_connections": n_connections}),
        **HTTP_OPTIONS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = _Server(config, models, service, settings.drain_seconds)
    try:
        await server.serve([sock])
    finally:
        models.stop()
        service.close()
        await asyncio.to_thread(models.join, _CLOSE_SECONDS)
    if models.failed:
        raise TgenError("the engine failed", "read the traceback above, and start the server again")
    return server.force_exit


class _Server(uvicorn.Server):
    """uvicorn's server, which drains before it closes its socket."""

    def __init__(
        self, config: uvicorn.Config, models: ServedModels, service: Service, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._models, self._service, self._drain_seconds = models, service, drain_seconds
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, *_: object) -> None:
        """Handle a signal: drain at the first one, end at the second."""
        self._loop.call_soon_threadsafe(self._on_signal)

    def finish(self) -> None:
        """End all texts and close the server."""
        self._models.stop()
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
        while self._models.n_running + self._models.n_waiting and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        self.finish()


def _allow_descriptors(n: int) -> None:
    """Allow this process so many open files; raises TgenError if the system does not."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if resource.RLIM_INFINITY != soft < n:
            resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    except (ValueError, OSError):
        message = f"--max-open needs {n:,} open files (limit of this process: {hard:,})"
        raise TgenError(message, "lower --max-open, or raise the limit with ulimit -n") from None


def _local_hosts(sock: socket.socket) -> frozenset[str]:
    return frozenset({"localhost", "127.0.0.1", "[::1]", sock.getsockname()[0]})
