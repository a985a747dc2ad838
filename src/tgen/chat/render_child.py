"""The process that renders chat templates: one JSON request per line, one JSON response per line.

A template is untrusted code. It runs in Jinja's sandbox, sees only plain data, and is limited to
the time and memory of this process.
"""

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tgen.machine.resource_limit import limit_cpu_time, set_limit

_MAX_CHARACTERS = 2 << 20  # per text


class _RejectedError(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """A namespace without names that give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> None:
    raise _RejectedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@lru_cache(maxsize=1)
def _compile(source: str) -> Template:
    """Compile a template with the settings and functions of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = _dict
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _render(source: str, variables: Mapping[str, Any]) -> str:
    parts, length = [], 0
    for part in _compile(source).generate(variables):
        length += len(part)
        if length > _MAX_CHARACTERS:
            raise MemoryError
        parts.append(part)
    text = "".join(parts)
    text.encode("utf-8", "surrogateescape")  # an unpaired surrogate is an error
    return text


def handle_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return `texts`, one per conversation, or the reason as `rejected` or `failed` with the number
    of the conversation as `at`."""
    now = datetime.fromisoformat(request["now"]) if request["now"] else datetime.now()
    shared = {
        **request["variables"],
        "documents": None,
        "strftime_now": lambda date_format: now.strftime(date_format),
    }
    texts: list[str] = []
    try:
        for messages, is_prompt, tools in zip(
            request["conversations"], request["prompts"], request["tools"], strict=True
        ):
            own = {"messages": messages, "add_generation_prompt": is_prompt, "tools": tools}
            if tools:
                own["xml_tools"] = tools  # the name that SmolLM3's template has for them
            texts.append(_render(request["source"], shared | own))
    except _RejectedError as error:
        return {"rejected": _to_line(str(error)), "at": len(texts)}
    except (MemoryError, OverflowError):
        return {"failed": "its output is too large", "at": len(texts)}
    except Exception as error:  # a template may raise anything
        return {"failed": _to_line(f"{type(error).__name__}: {error}"), "at": len(texts)}
    return {"texts": texts}


def _to_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:200]


def main() -> None:
    """Handle requests until the end of stdin."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        set_limit("RLIMIT_AS", request["bytes"])
        limit_cpu_time(request["seconds"])
        sys.stdout.buffer.write(json.dumps(handle_request(request)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
