"""Errors of a request, in the form that clients of OpenAI's API expect."""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

from starlette.responses import Response

from tgen.errors import ContextError, TgenError

_RETRY_SECONDS = 1
_PART = re.compile(r"[.\[]")  # the start of a part of a field
_OTHER_FIELD = re.compile(r"(cannot be combined with |\(got )(\w+)(\)?)$")  # ends a message


class HttpError(TgenError):
    """An error with an HTTP status; `param` is the field of the request that it names, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, dict[str, str | None]]:
        """The body of the response, which is also the last event of a stream that fails."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def use_names(self, names: Mapping[str, str]) -> Self:
        """Name fields as the client does, in place; `names` are its names of fields or of parts of
        them. Returns the error."""
        message = self.message
        if (param := self.param) is not None:
            self.param = name_as_sent(param, names)
            if message.startswith(param):
                message = self.param + message.removeprefix(param)
            message = message.replace(repr(param), repr(self.param), 1)
        self.message = _OTHER_FIELD.sub(lambda m: m[1] + names.get(m[2], m[2]) + m[3], message)
        self.args = (self.message,)
        return self

    def response(self, path: str) -> Response:
        """Return the HTTP response to a request of `path`, where Ollama's API has another form.

        It is in ASCII: its names may have unpaired surrogates.
        """
        content = {"error": self.message} if path.startswith("/api/") else self.content
        return Response(json.dumps(content), self.status, self.headers, "application/json")


def name_as_sent(field: str, names: Mapping[str, str]) -> str:
    """Return the client's name of a field; `names` has those of fields or of parts of them."""
    # Only the parents of the field are looked up: a request may have thousands of names.
    ends = [*(match.start() for match in _PART.finditer(field)), len(field)]
    parent = next((field[:end] for end in reversed(ends) if field[:end] in names), "")
    return names.get(parent, "") + field.removeprefix(parent)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """Return the error of a request that is malformed or cannot be fulfilled."""
    return HttpError(400, message, param=param, code=code)


def model_not_found(name: str, served: Sequence[str]) -> HttpError:
    """Return the error of a request for another model than those that are served."""
    has = ", ".join(map(repr, served))
    message = f"the model {name[:100]!r} does not exist; this server has {has}"
    return HttpError(404, message, code="model_not_found", param="model")


def unavailable(message: str, code: str) -> HttpError:
    """Return the error of a server that is stopping or has failed; clients try again elsewhere."""
    headers = {"Retry-After": str(_RETRY_SECONDS), "Connection": "close"}
    return HttpError(503, message, kind="server_error", code=code, headers=headers)


def busy(message: str, code: str) -> HttpError:
    """Return the error of a request for which the server has no room or time now."""
    headers = {"Retry-After": str(_RETRY_SECONDS)}
    message = f"{message}; try again later"
    return HttpError(429, message, kind="rate_limit_error", code=code, headers=headers)


def timed_out(message: str) -> HttpError:
    """Return the error of a request that took too long; trying again would take as long."""
    headers = {"Retry-After": str(_RETRY_SECONDS), "x-should-retry": "false"}
    return HttpError(503, message, kind="timeout_error", code="timeout", headers=headers)


def internal_error() -> HttpError:
    """Return the error of a bug, whose details only the log has."""
    return HttpError(500, "internal error; the server's log has the details", kind="server_error")


def to_http(error: Exception, names: Mapping[str, str] = MappingProxyType({})) -> HttpError:
    """Return the HTTP form of an error that the text or the model caused.

    `names`: the client's names of options of SamplingConfig, and of fields.
    """
    if isinstance(error, HttpError):
        return error.use_names(names)
    if not isinstance(error, TgenError):
        return internal_error()
    if isinstance(error, ContextError):
        field = names.get("messages", "messages")
        return bad_request(error.message, field, "context_length_exceeded")
    field = getattr(error, "field", "").partition(" ")[0]
    if not field:
        return bad_request(error.message)
    expected = error.hint.partition(f"set {field} to ")[2]
    message = error.message + (f", expected {expected}" if expected else "")
    return bad_request(message, field).use_names(names)
