"""The fields of a request that are about tools: functions, earlier calls, and the choice."""

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator

from tgen.chat.call_syntax import read_arguments
from tgen.serve.json_body import JsonObject, JsonSchema, Unicode

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("up to 128 letters, digits and characters of _ . : / -")
    return name


def _check_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without null keywords, which programs in Go write for empty ones."""
    schema = {keyword: value for keyword, value in given.items() if value is not None}
    if "properties" in given:
        schema.setdefault("properties", {})
    if schema.get("type", "object") != "object":
        raise ValueError("a schema of the type object")
    return schema


class _Function(JsonObject):
    name: Annotated[str, AfterValidator(_check_name)]
    description: Unicode | None = None
    parameters: Annotated[JsonSchema, AfterValidator(_check_parameters)] | None = None


class Tool(JsonObject):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool for the chat template, in the usual order."""
        function = self.function
        described = {"description": function.description} if function.description else {}
        parameters = {"type": "object", **(function.parameters or {"properties": {}})}
        shown = {"name": function.name, **described, "parameters": parameters}
        return {"type": "function", "function": shown}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments; an empty list of properties allows none."""
        schema: dict[str, Any] = self.for_template["function"]["parameters"]
        has_none = schema.get("properties") == {} and not schema.get("required")
        return ({"additionalProperties": False} if has_none else {}) | schema


class _CalledFunction(JsonObject):
    name: Unicode
    arguments: Any = None  # JSON in a string, or an object; "" and null mean none


class ToolCall(JsonObject):
    """A call in an earlier message."""

    id: Unicode = ""
    function: _CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """The call for the chat template, with arguments as an object if they are one."""
        arguments = read_arguments(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolChoice(NamedTuple):
    """Whether the model may call, must call, or must call one function."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _check_choice(value: Any) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    try:
        kind, name = value.get("type", "function"), value["function"]["name"]
        if kind == "function" and isinstance(name, str):
            return ToolChoice("required", name)
    except (AttributeError, KeyError, TypeError):
        pass
    example = '{"type": "function", "function": {"name": ...}}'
    raise ValueError(f"none, auto, required, or a function such as {example}")


ToolChoiceField = Annotated[ToolChoice, PlainValidator(_check_choice)]
ToolsField = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]  # as in OpenAI's API
