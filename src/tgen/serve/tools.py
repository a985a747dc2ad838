"""Tools: the fields of a request, the grammar that its texts follow, and the calls in a text.

A call is constrained to the syntax of the model's chat template, or without one to JSON.
"""

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator

from tgen.chat.call_syntax import PLAIN, CallSyntax
from tgen.errors import UsageError
from tgen.serve.http_error import bad_request
from tgen.serve.json_body import JsonObject, Unicode, check_unicode

_MAX_CALLS = 16  # per text
_MAX_SCHEMA_BYTES = 1 << 16
_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other
# One space after colons and commas, none elsewhere: white space could repeat endlessly.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LINE = re.compile(r"grammar: (?:line (\d+): )?")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("up to 128 letters, digits and characters of _ . : / -")
    return name


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    text = check_unicode(json.dumps(schema, ensure_ascii=False))
    if len(text) > _MAX_SCHEMA_BYTES or schema.get("type", "object") != "object":
        raise ValueError(f"a schema of the type object and up to {_MAX_SCHEMA_BYTES:,} characters")
    return schema


class _Function(JsonObject):
    name: Annotated[str, AfterValidator(_check_name)]
    description: Unicode | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None


class Tool(JsonObject):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    @property
    def plain(self) -> dict[str, Any]:
        """The tool for the chat template, in the usual order."""
        function = self.function
        described = {"description": function.description} if function.description else {}
        parameters = {"type": "object", **(function.parameters or {"properties": {}})}
        shown = {"name": function.name, **described, "parameters": parameters}
        return {"type": "function", "function": shown}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments; an empty list of properties allows none."""
        schema: dict[str, Any] = self.plain["function"]["parameters"]
        closed = {"additionalProperties": False} if schema.get("properties") == {} else {}
        return closed | schema


class _CalledFunction(JsonObject):
    name: Unicode
    arguments: Any  # JSON in a string, or an object


class Call(JsonObject):
    """A call in an earlier message."""

    id: Unicode = ""
    function: _CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """The call for the chat template, with arguments as an object if they are one."""
        arguments = self.function.arguments
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):  # a text that its limit ended
            parsed = arguments
        function = {"name": self.function.name, "arguments": parsed}
        return {"id": self.id, "type": "function", "function": function}


class Choice(NamedTuple):
    """Whether the model may call, must call, or must call one function."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _check_choice(value: Any) -> Choice:
    if value in ("none", "auto", "required"):
        return Choice(value)
    try:
        if value["type"] == "function" and isinstance(value["function"]["name"], str):
            return Choice("required", value["function"]["name"])
    except (KeyError, TypeError):
        pass
    example = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f"none, auto, required, or a function such as {example}")


ChoiceField = Annotated[Choice, PlainValidator(_check_choice)]
ToolsField = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]  # as in OpenAI's API


class CallForm(NamedTuple):
    """The form of the calls in a request's texts."""

    tools: Sequence[Tool]
    syntax: CallSyntax
    controls: Mapping[str, int]  # the syntax's control tokens, whose bytes are no text
    choice: Choice
    parallel: bool
    text_schema: Mapping[str, Any] | None  # of a text without calls

    @property
    def only_at_start(self) -> bool:
        """Whether a text that calls starts with the call."""
        forced, has_schema = self.choice.mode == "required", self.text_schema is not None
        return forced or has_schema or self.syntax.only_at_start

    @property
    def constraint(self) -> dict[str, Any]:
        """The option of SamplingConfig that constrains the texts."""
        if self.syntax == PLAIN:
            return {"json_schema": self._schema()}
        return {"grammar": self.grammar()}

    def _schema(self) -> dict[str, Any]:
        """Return the JSON schema of one call in JSON."""
        calls, definitions = [], {}
        for i, tool in enumerate(self.tools):
            root = f"#/$defs/tool{i}"
            definitions[f"tool{i}"] = _move_references(tool.arguments_schema, root)
            properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": root}}
            required = [*properties]
            call = {"type": "object", "properties": properties, "required": required}
            calls.append(call | {"additionalProperties": False})
        return {"anyOf": calls, "$defs": definitions}

    def grammar(self) -> str:
        """Return the Lark grammar of the texts, whose first lines are those of the tools."""
        names, lines = [f"call{i}" for i in range(len(self.tools))], []
        for name, tool in zip(names, self.tools, strict=True):
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
        rest = self._literal(opener.removeprefix(trigger))
        if trigger in self.controls:
            return [f"start: {all_text} ({self._literal(trigger)} {rest} calls)?"]
        return [
            f"start: opened {rest} calls | TEXT",
            f"opened[lazy]: /(?s:.*){escaped}/",
            f"TEXT: {all_text} & ~/(?s:.*){escaped}(?s:.*)/",
        ]

    def _literal(self, text: str) -> str:
        """Return the terms of a text that may contain control tokens."""
        pattern = "|".join(map(re.escape, self.controls)) or "(?!)"
        parts = re.split(f"({pattern})", text)
        terms = (
            f"<[{self.controls[part]}]>" if part in self.controls else _quote(part)
            for part in parts
            if part
        )
        return " ".join(terms)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise HttpError for an invalid grammar, with the tool that it is about."""
        try:
            yield
        except UsageError as error:
            if getattr(error, "field", "") != "grammar":
                raise
            match = _LINE.match(error.message)
            reason = error.message[match.end() :] if match else error.message
            field = "tools"
            if match and match[1] and int(match[1]) <= len(self.tools):
                field = f"tools[{int(match[1]) - 1}].function.parameters"
            raise bad_request(f"{field}: {reason}", field) from None


def plan_calls(
    tools: Sequence[Tool],
    choice: Choice,
    syntax: CallSyntax | None,
    added_tokens: Mapping[str, int],
    *,
    parallel: bool,
    text_schema: Any,
) -> CallForm:
    """Return how texts call these tools; `added_tokens` are the control tokens without bytes.

    Raises HttpError if the model does not support the choice.
    """
    if choice.mode == "auto" and syntax is None:
        raise bad_request(
            "tools: the model's chat template has no calls of tools in a form that is known, so "
            'tool_choice cannot be "auto"; use "required" or a function',
            "tool_choice",
            "unsupported_parameter",
        )
    syntax = syntax or PLAIN
    distinct = text_schema is None or (isinstance(text_schema, dict) and not syntax.only_at_start)
    if choice.mode == "auto" and not distinct:
        message = "response_format cannot be combined with the tools of this model"
        raise bad_request(message, "response_format", "unsupported_parameter")
    called = [tool for tool in tools if choice.name in (None, tool.function.name)]
    if not called:
        raise bad_request(f"tool_choice: no tool is named {choice.name!r:.60}", "tool_choice")
    parts = (syntax.opener, syntax.middle, syntax.separator, syntax.closer)
    controls = {name: i for name, i in added_tokens.items() if any(name in part for part in parts)}
    return CallForm(called, syntax, controls, choice, parallel, text_schema)


class CallReader:
    """The content and the calls of a text, as it comes.

    `calls` are the calls so far, `deltas` what is new of them since they were taken.
    """

    def __init__(self, form: CallForm) -> None:
        self._syntax, self._only_at_start = form.syntax, form.only_at_start
        self._names = {i: name for name, i in form.controls.items()}
        self._waiting = ""  # text of which the meaning is not known yet
        self._read = self._read_text
        self._opener = form.syntax.opener
        self._depth, self._in_string, self._escaped = 0, False, False  # within the arguments
        self.calls: list[dict[str, Any]] = []
        self.deltas: list[dict[str, Any]] = []

    def feed(self, token: int, text: str, *, last: bool) -> str:
        """Add a token's text; return the content that is new."""
        self._waiting += self._names.get(token, text)
        content, before = "", None
        while before != (self._read, self._waiting):
            before = self._read, self._waiting
            content += self._read()
        if last and self._read == self._read_text:
            content, self._waiting = content + self._waiting, ""
        return content

    def take_deltas(self) -> list[dict[str, Any]]:
        """Return what is new of the calls since the last time."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def _read_text(self) -> str:
        """Return the content before the first call, as far as it is none."""
        trigger, text = self._syntax.trigger, self._waiting
        at = text.find(trigger)
        if at == 0 or (at > 0 and not self._only_at_start):
            self._read, self._waiting = self._read_name, text[at:]
            return text[:at].rstrip()
        if self._only_at_start:
            n = 0 if trigger.startswith(text) else len(text)
            if n:
                self._read = self._read_content
        else:  # the white space before a call is not content
            starts = range(max(0, len(text) - len(trigger)), len(text))
            n = next((i for i in starts if trigger.startswith(text[i:])), len(text))
            n = len(text[:n].rstrip())
        self._waiting = text[n:]
        return text[:n]

    def _read_content(self) -> str:
        text, self._waiting = self._waiting, ""
        return text

    def _read_name(self) -> str:
        """Start a call if the text has what is before its arguments."""
        name, middle, rest = self._waiting.partition(self._syntax.middle)
        if middle:
            self._waiting, self._read = rest, self._read_arguments
            identifier = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
            function = {"name": name.removeprefix(self._opener), "arguments": ""}
            call = {"id": identifier, "type": "function", "function": function}
            self.calls.append(call)
            self.deltas.append({"index": len(self.calls) - 1, **call, "function": {**function}})
        return ""

    def _read_arguments(self) -> str:
        """Add to the arguments up to their last brace."""
        text, n = self._waiting, 0
        while n < len(text) and self._read == self._read_arguments:
            character, n = text[n], n + 1
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self._read = self._read_separator
        if n:
            self._waiting, index = text[n:], len(self.calls) - 1
            self.calls[-1]["function"]["arguments"] += text[:n]
            if not self.deltas or self.deltas[-1]["index"] != index:
                self.deltas.append({"index": index, "function": {"arguments": ""}})
            self.deltas[-1]["function"]["arguments"] += text[:n]
        return ""

    def _read_separator(self) -> str:
        separator = self._syntax.separator
        if separator and self._waiting.startswith(separator):
            self._waiting, self._opener = self._waiting.removeprefix(separator), ""
            self._read = self._read_name
        return ""


def _move_references(value: Any, root: str) -> Any:
    """Return a schema that is at `root` of another one."""
    if isinstance(value, list):
        return [_move_references(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _move_references(one, root) for name, one in value.items()}
    target = value.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _ONE_LINE}, ensure_ascii=False)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
