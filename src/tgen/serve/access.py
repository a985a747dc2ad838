"""Access to the server: its key, and the hosts that requests may name."""

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import Scope

from tgen.serve.http_error import HttpError


class Access:
    """A check of a request's Host and key. Without a key, the Host header must be one of
    `allowed_hosts`, if given: a web page whose name resolves to this machine cannot use the
    server. Requests without the header, such as health checks in HTTP/1.0, are not a browser's."""

    def __init__(self, api_key: str | None, allowed_hosts: Collection[str] | None) -> None:
        self._key_digest = _digest(api_key.encode()) if api_key is not None else None
        self._allowed_hosts = allowed_hosts if api_key is None else None

    def check(self, scope: Scope, *, needs_key: bool = True) -> None:
        """Raise HttpError for a request that may not be answered."""
        headers = dict(scope["headers"])
        host = _host_name(headers.get(b"host", b"localhost"))
        if self._allowed_hosts is not None and host not in self._allowed_hosts:
            message = f"the host {host[:100]!r} is not served without an API key"
            raise HttpError(403, message, code="host_not_allowed")
        if self._key_digest is None or not needs_key or scope["path"] == "/health":
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Digests have equal lengths: the comparison takes the same time for every key.
        equal = hmac.compare_digest(_digest(key.strip()), self._key_digest)
        if scheme.lower() != b"bearer" or not equal:
            raise HttpError(
                401,
                "no valid API key: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_name(header: bytes) -> str:
    """Return the name in a Host header, without the port."""
    host = header.decode("latin-1").lower()
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
