"""The process that renders chat templates: a line of JSON comes in, a line of JSON goes out.

A template is a program from elsewhere. Here it has Jinja's sandbox around it, plain data before it,
and no more time and memory than this process has.
"""

import json
import sys
import time
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

_LONGEST = 2 << 20  # characters of a text


class _RefusedError(TemplateError):
    """The template itself says that it cannot have these messages."""


class _Generation(Extension):
    """`{% generation %}`: for training it marks what the model wrote; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """A namespace without the names that lead into Python."""

    def __init__(*given: Any, **named: Any) -> None:
        self, *others = given
        Namespace.__init__(self)
        for name, value in dict(*others, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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


def _dict(*given: Any, **named: Any) -> dict[Any, Any]:
    return dict(*given, **named)


@lru_cache(maxsize=1)
def _compiled(source: str) -> Template:
    """With the settings and the names that templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = _dict
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _rendered(source: str, variables: Mapping[str, Any]) -> str:
    parts, length = [], 0
    for part in _compiled(source).generate(variables):
        length += len(part)
        if length > _LONGEST:
            raise MemoryError
        parts.append(part)
    text = "".join(parts)
    text.encode("utf-8", "surrogateescape")  # half of a surrogate pair is an error
    return text


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """`texts`, one a conversation; or `refused` or `failed` with the reason."""
    try:
        usual = {**asked["variables"], "add_generation_prompt": True, "tools": None}
        usual["documents"] = None
        texts = [
            _rendered(asked["source"], usual | {"messages": messages})
            for messages in asked["conversations"]
        ]
    except _RefusedError as error:
        return {"refused": _line(str(error))}
    except (MemoryError, OverflowError):
        return {"failed": "it makes too much of them"}
    except Exception as error:  # whatever a program may raise
        return {"failed": _line(f"{type(error).__name__}: {error}")}
    return {"texts": texts}


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:200]


def _limit(kind: str, most: int) -> None:
    """Bounds what this process may use, where the platform can."""
    with suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        number = getattr(resource, kind)
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (most, hard))


def main() -> None:
    """Answers until there is nothing more to read."""
    with suppress(ImportError, ValueError):
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        _limit("RLIMIT_AS", asked["bytes"])
        # Should nobody be left to end it.
        _limit("RLIMIT_CPU", int(time.process_time()) + asked["seconds"] + 1)
        sys.stdout.buffer.write(json.dumps(answer(asked)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
