"""The form of the calls in a request's texts, and the grammar that constrains the texts to it.

A call has the syntax of the model's chat template, or is JSON without one.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urldefrag, urljoin

from tgen.chat.call_syntax import PLAIN, CallSyntax
from tgen.errors import TgenError
from tgen.generation.json_schema import ONE_LINE
from tgen.serve.http_error import bad_request
from tgen.serve.text_request import ChatRequest
from tgen.serve.tool_fields import Tool, ToolChoice
from tgen.tokenizer.expressible import any_of

_MAX_CALLS = 16  # per text
_PLACE = re.compile(  # of a tool in the constraint
    r"(?:line (\d+)|\$defs\.tool(\d{1,3})|anyOf\[(\d+)\]\.properties\.arguments)(?:\.|: )"
)


@dataclass(frozen=True)
class CallForm:
    """The form of the calls in a request's texts."""

    tools: Mapping[int, Tool]  # that can be called, by their position in the request
    syntax: CallSyntax
    controls: Mapping[str, int]  # the syntax's control tokens, which have no text
    choice: ToolChoice
    parallel: bool
    text_schema: Mapping[str, Any] | None  # of a text without calls
    text_field: str | None  # of the request, with this schema

    @property
    def only_at_start(self) -> bool:
        """Whether a text that calls starts with the call."""
        forced, has_schema = self.choice.mode == "required", self.text_schema is not None
        return forced or has_schema or self.syntax.only_at_start

    @cached_property
    def constraint(self) -> dict[str, Any]:
        """The options of SamplingConfig that constrain the texts, in place of the request's."""
        if self.syntax == PLAIN:
            return {"json_schema": self._schema()}
        return {"grammar": self._grammar(), "json_schema": None}

    def _schema(self) -> dict[str, Any]:
        """Return the JSON schema of one call in JSON."""
        calls, definitions = [], {}
        for (i, tool), address in zip(self.tools.items(), self._addresses(), strict=True):
            definitions[f"tool{i}"] = tool.arguments_schema | {"$id": address}
            arguments = {"$ref": f"#/$defs/tool{i}"}
            properties = {"name": {"const": tool.function.name}, "arguments": arguments}
            required = [*properties]
            call = {"type": "object", "properties": properties, "required": required}
            calls.append(call | {"additionalProperties": False})
        return {"anyOf": calls, "$defs": definitions}

    def _addresses(self) -> list[str]:
        """Return the address of each tool's schema, which keeps its references within it: its own
        one, unless another tool has the same."""
        own = [_address(i, tool.arguments_schema) for i, tool in self.tools.items()]
        return [
            address if own.count(address) == 1 else f"tool{i}/"
            for i, address in zip(self.tools, own, strict=True)
        ]

    def _grammar(self) -> str:
        """Return the Lark grammar of the texts, whose first lines are those of the tools."""
        names, lines = [f"call{i}" for i in self.tools], []
        for name, tool in zip(names, self.tools.values(), strict=True):
            before = self._literal(tool.function.name + self.syntax.middle)
            lines.append(f"{name}: {before} {_json(tool.arguments_schema)}")
        more = ""
        if self.parallel and self.syntax.separator and not self.choice.name:
            more = f"({self._literal(self.syntax.separator)} call){{0,{_MAX_CALLS - 1}}}"
        calls = f"calls: call {more} {self._literal(self.syntax.closer)}"
        return "\n".join([*lines, f"call: {' | '.join(names)}", calls, *self._start()])

    def _start(self) -> list[str]:
        """Return the rules that choose between text and calls."""
        opener, trigger = self.syntax.opener, self.syntax.trigger
        escaped, all_text = "".join(rf"\x{{{ord(c):x}}}" for c in trigger), "/(?s:.*)/"
        start = f"start: {self._literal(opener)} calls"
        if self.choice.mode == "required":
            return [start]
        if self.text_schema is not None:
            return [f"{start} | {_json(self.text_schema)}"]
        if self.syntax.only_at_start:
            return [f"{start} | TEXT", f"TEXT: {all_text} & ~/{escaped}(?s:.*)/"]
        if trigger.startswith(tuple(self.controls)):
            return [f"start: {all_text} ({self._literal(opener)} calls)?"]
        rest = self._literal(opener.removeprefix(trigger))
        return [
            f"start: opened {rest} calls | TEXT",
            f"opened[lazy]: /(?s:.*){escaped}/",
            f"TEXT: {all_text} & ~/(?s:.*){escaped}(?s:.*)/",
        ]

    def _literal(self, text: str) -> str:
        """Return the terms of a text that may contain control tokens."""
        terms = (
            f"<[{self.controls[part]}]>" if part in self.controls else _quote(part)
            for part in self.split(text)
        )
        return " ".join(terms)

    def split(self, text: str) -> list[str]:
        """Return the names of control tokens in a part of the syntax, and the texts between."""
        return [part for part in re.split(f"({any_of(self.controls)})", text) if part]

    def name_tool(self, error: TgenError) -> TgenError:
        """Return an error with the tool that it is about, if it is about the constraint."""
        option = getattr(error, "field", "")
        if option not in self.constraint:
            return error
        field, reason = self.name_place(error.message.removeprefix(f"{option}: "))
        return bad_request(f"{field}: {reason}", field)

    def name_place(self, text: str) -> tuple[str, str]:
        """Return the request's field that a text about the constraint begins with, and the rest."""
        field = "tools[{}].function.parameters"
        match = _PLACE.match(text)
        if match is None or (match[2] and int(match[2]) not in self.tools):
            return field.format(*self.tools) if len(self.tools) == 1 else "tools", text
        line, position, called = (int(one) if one else None for one in match.groups())
        if line is not None:
            called = line - 1  # the first lines are those of the tools
        if called is not None and called < len(self.tools):
            position = [*self.tools][called]
        rest = text[match.end() :]
        if position is None:
            return self.text_field or "tools", rest
        return field.format(position), rest


def plan_calls(
    request: ChatRequest, syntax: CallSyntax | None, control_tokens: Mapping[str, int]
) -> CallForm:
    """Return how the texts of a request with tools call them.

    `syntax` is the chat template's, if it is known; `control_tokens` are the control tokens without
    bytes. Raises HttpError if the model does not support the choice.
    """
    choice, text_field = request.tool_choice, request.text_constraint
    text_schema = request.sampling.get("json_schema")
    if choice.mode == "auto" and (syntax is None or _starts_late(syntax, control_tokens)):
        raise bad_request(
            "tools: the model's chat template has no known syntax of tool calls, so "
            'tool_choice cannot be "auto"; use "required" or a function',
            "tool_choice",
            "unsupported_parameter",
        )
    syntax = syntax or PLAIN
    distinct = text_schema is None or (isinstance(text_schema, dict) and not syntax.only_at_start)
    if choice.mode == "auto" and not distinct:
        message = f"{text_field} cannot be combined with the tools of this model"
        raise bad_request(message, text_field, "unsupported_parameter")
    tools = enumerate(request.tools)
    called = {i: tool for i, tool in tools if choice.name in (None, tool.function.name)}
    if not called:
        raise bad_request(f"tool_choice: no tool is named {choice.name!r:.60}", "tool_choice")
    parts = (syntax.opener, syntax.middle, syntax.separator, syntax.closer)
    controls = {
        name: i for name, i in control_tokens.items() if any(name in part for part in parts)
    }
    parallel = request.parallel_tool_calls
    return CallForm(called, syntax, controls, choice, parallel, text_schema, text_field)


def _starts_late(syntax: CallSyntax, control_tokens: Mapping[str, int]) -> bool:
    """Return whether there is a text before the control token that tells a call from a text."""
    names, trigger = tuple(control_tokens), syntax.trigger
    return any(name in trigger for name in names) and not trigger.startswith(names)


def _address(i: int, schema: Mapping[str, Any]) -> str:
    """Return the address that the schema of a tool gives itself, or one made of its position."""
    base, own = f"tool{i}/", schema.get("$id", schema.get("id") if "$schema" in schema else None)
    with suppress(ValueError):  # of a host that is not valid
        return urldefrag(urljoin(base, own if isinstance(own, str) else "")).url
    return base


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": ONE_LINE}, ensure_ascii=False)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
