"""OpenAI's /v1/responses: a request becomes a chat, and the chat's answer a list of items.

Nothing is stored: a client sends the whole conversation with each request.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from tgen.serve.engine_thread import Job
from tgen.serve.http_error import HttpError, bad_request
from tgen.serve.http_response import OpenAIForm, dump_json
from tgen.serve.json_body import (
    JsonObject,
    Objects,
    Unicode,
    Whole,
    list_parts,
    load_object,
    validate,
)
from tgen.serve.sampling_fields import SamplingFields
from tgen.serve.text_request import ChatRequest, to_request

_STATE = ("previous_response_id", "conversation", "prompt", "background", "store")
_WITH_LOGPROBS = "message.output_text.logprobs"
# Values of `include`; the others are about items that this server never returns.
_Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
# Fields that have no influence on the answer.
_IGNORED = {
    *("client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "reasoning", "safety_identifier", "service_tier"),
    *("stream_options", "user"),
}
# Fields of a chat -> their names here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_REPEATED = ("metadata", "text", "tool_choice", "tools")  # any JSON, in the answer, too
_SPARE_DEPTH = 100  # calls that write the answer, at most
_Event = dict[str, Any]


def _list_items(value: Any) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(i, dict) for i in items):
        raise ValueError("a string or a list of items")
    return items


def _check_tool_choice(value: Any) -> Any:
    is_function = isinstance(value, dict) and value.get("type") == "function"
    if is_function and not isinstance(value.get("name", ""), str):
        example = '{"type": "function", "name": ...}'
        raise ValueError(f"none, auto, required, or a function such as {example}")
    return value


class _Part(JsonObject):
    type: Literal["input_text", "output_text"]
    text: Unicode


_LISTED = BeforeValidator(partial(list_parts, kind="input_text"))
_Parts = Annotated[list[_Part], Field(min_length=1, fail_fast=True), _LISTED]


class _MessageItem(JsonObject):
    role: Unicode
    content: _Parts


class _CallItem(JsonObject):
    call_id: Unicode
    name: Unicode
    arguments: Unicode


class _CallOutputItem(JsonObject):
    call_id: Unicode
    output: _Parts


class _Format(JsonObject, extra="forbid"):
    type: Literal["text", "json_object", "json_schema"] = "text"
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: Any = None
    description: Any = None
    strict: Any = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        others = (self.definition, self.name, self.description, self.strict)
        if self.type != "json_schema" and any(one is not None for one in others):
            raise ValueError(f"no other field beside the type {self.type}")
        return self


class _Text(JsonObject):
    format: _Format = _Format()


class _Body(SamplingFields, extra="forbid"):
    """The fields of a request that have an influence on the answer."""

    model: Any = None
    input: Annotated[list[dict[str, Any]], PlainValidator(_list_items)]
    instructions: Unicode | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    stream: bool = False
    text: _Text = _Text()
    tools: Objects | None = None
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    include: Annotated[list[_Included], Field(fail_fast=True)] | None = None
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, Any] | None = None


def read(body: bytes, model: str) -> tuple[ChatRequest, "ResponsesForm"]:
    """Return the chat that a body asks for, and the form of its answer; raises HttpError."""
    values = {name: value for name, value in load_object(body).items() if name not in _IGNORED}
    for name in _STATE:
        if values.pop(name, None):
            hint = "this server stores nothing; send store: false and the whole input"
            message = f"{name} is not supported: {hint}"
            raise bad_request(message, name, "unsupported_parameter")
    if "response_format" in values:
        raise bad_request("response_format is not supported; use text.format", "response_format")
    request = validate(_Body, values)
    chat = {name: values[name] for name in SamplingFields.model_fields if name in values}
    messages, names = _to_messages(request)
    chat |= {"model": request.model or model, "messages": messages}
    if request.max_output_tokens is not None:
        chat["max_tokens"] = request.max_output_tokens
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.text.format.type != "text":
        chat["response_format"] = _to_response_format(values["text"]["format"])
    if tools := request.tools or []:
        chat["tools"] = [_to_tool(i, tool) for i, tool in enumerate(tools)]
        chat["parallel_tool_calls"] = request.parallel_tool_calls
    if "tool_choice" in values:
        chat["tool_choice"] = _to_tool_choice(request.tool_choice)
    if _WITH_LOGPROBS in (request.include or ()):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    elif request.top_logprobs:
        raise bad_request(f"top_logprobs needs include: [{_WITH_LOGPROBS!r}]", "top_logprobs")
    names |= _NAMES | {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))}
    return to_request(chat, ChatRequest, model, names), ResponsesForm(request, values)


def _to_messages(request: _Body) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the chat messages of the instructions and items, and the field of the request that
    each message comes from."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    if request.instructions is not None:
        names["messages[0]"] = "instructions"
        messages.append({"role": "system", "content": request.instructions})
    for i, item in enumerate(request.input):
        kind, at = item.get("type", "message"), f"input[{i}]"
        if kind == "message":
            said = validate(_MessageItem, item, at)
            messages.append({"role": said.role, "content": _join(said.content)})
        elif kind == "function_call":
            call = validate(_CallItem, item, at)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": call.name, "arguments": call.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": call.call_id, "type": "function", "function": function})
        elif kind == "function_call_output":
            output = validate(_CallOutputItem, item, at)
            content = _join(output.output)
            messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})
        else:
            message = f"{at}.type: {str(kind)[:60]!r} is not supported"
            if kind == "item_reference":
                message += ": this server stores nothing; send store: false and the whole items"
            raise bad_request(message, f"{at}.type", "unsupported_parameter")
        names.setdefault(f"messages[{len(messages) - 1}]", at)
    return messages, names


def _check_json(name: str, value: Any) -> None:
    """Raise HttpError for a value of a field that JSON in UTF-8 cannot express, RecursionError for
    one that is nested too deeply for an answer that contains it."""
    for _ in range(_SPARE_DEPTH):
        value = [value]
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name}: expected text without unpaired surrogates", name) from None
    except ValueError:
        raise bad_request(f"{name}: expected finite numbers", name) from None


def _join(parts: Iterable[_Part]) -> str:
    return "".join(part.text for part in parts)


def _to_response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: v for name, v in form.items() if name != "type" and v is not None}
    return {"type": form["type"]} | ({"json_schema": rest} if rest else {})


def _to_tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"tools[{i}].type: {str(tool.get('type'))[:60]!r} is not supported, only function"
        raise bad_request(message, f"tools[{i}].type", "unsupported_parameter")
    rest = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": rest}


def _to_tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


class ResponsesForm(OpenAIForm):
    """The response object and the events of its stream, which end with the same object."""

    def __init__(self, request: _Body, values: Mapping[str, Any]) -> None:
        """`values` are those that the client has sent."""
        form = {"type": "text", **values.get("text", {}).get("format", {})}
        self._settings = {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": values.get("temperature"),
            "text": {"format": form},
            "tool_choice": request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs,
            "top_p": values.get("top_p"),
        }
        for name in _REPEATED:
            _check_json(name, self._settings[name])
        self._head: dict[str, Any] = {}
        self._items: list[dict[str, Any]] = []  # the last one is open until the text ends
        self._call_index: int | None = None  # of the open item in the chat's calls
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not complete
        self._finish = ""
        self._usage: dict[str, Any] | None = None
        self._n_events = 0

    def whole(self, answer: dict[str, Any], _: Job) -> dict[str, Any]:
        """Return the response object."""
        (choice,) = answer["choices"]
        for _event in self._events(answer | {"choices": [choice | {"delta": choice["message"]}]}):
            pass
        return self._response(self._status)

    def chunks(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Return the events that the chunks of a chat amount to."""
        return b"".join(self._encode(event) for chunk in chunks for event in self._events(chunk))

    def end(self, _: Job) -> bytes:
        """Return the event with the whole response."""
        status = self._status
        return self._encode({"type": f"response.{status}", "response": self._response(status)})

    def error(self, error: HttpError) -> bytes:
        """Return OpenAI's error event; `error` is where its clients look."""
        return self._encode(error.content["error"] | {"type": "error"} | error.content)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _encode(self, event: _Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._n_events} | event
        self._n_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dump_json(numbered))

    def _response(self, status: str) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            **self._settings,
            "output": [*self._items],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self._usage,
        }

    def _events(self, chunk: Mapping[str, Any]) -> Iterator[_Event]:
        """Yield the events of a chunk. They share the items, so each is encoded at once."""
        if not self._head:
            self._head = {
                "id": "resp_" + chunk["id"].partition("-")[2],
                "object": "response",
                "created_at": chunk["created"],
                "model": chunk["model"],
            }
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": self._response("in_progress")}
        if usage := chunk.get("usage"):
            self._usage = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._logprobs += (choice["logprobs"] or {}).get("content", [])
            if text := delta.get("content"):
                yield from self._add_text(text)
            for index, call in enumerate(delta.get("tool_calls") or ()):
                yield from self._add_call(call.get("index", index), call)
            if choice["finish_reason"]:
                self._finish = choice["finish_reason"]
                if not self._items:
                    yield from self._add_text("")
                yield from self._close(self._status)

    def _add_text(self, text: str) -> Iterator[_Event]:
        if not self._items or self._items[-1]["type"] != "message":
            yield from self._open("msg", {"type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield {"type": "response.content_part.added", **self._place, "part": part}
            self._items[-1]["content"].append(part)
        (part,), logprobs, self._logprobs = self._items[-1]["content"], self._logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            delta = {"delta": text, "logprobs": logprobs}
            yield {"type": "response.output_text.delta", **self._place, **delta}

    def _add_call(self, index: int, call: Mapping[str, Any]) -> Iterator[_Event]:
        function, self._logprobs = call["function"], []
        if index != self._call_index:
            name = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._open("fc", {"type": "function_call", **name})
            self._call_index = index
        delta = function.get("arguments", "")
        self._items[-1]["arguments"] += delta
        if delta:
            kind = "response.function_call_arguments.delta"
            yield {"type": kind, **self._place, "delta": delta}

    @property
    def _place(self) -> dict[str, Any]:
        """The position of the open item."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if item["type"] == "message" else {})

    def _open(self, prefix: str, item: Mapping[str, Any]) -> Iterator[_Event]:
        if self._items:
            yield from self._close("completed")
        number = len(self._items)
        name = f"{prefix}_{self._head['id'].partition('_')[2]}{number:02x}"
        self._items.append({"id": name, "status": "in_progress", **item})
        added = {"output_index": number, "item": self._items[-1]}
        yield {"type": "response.output_item.added", **added}

    def _close(self, status: str) -> Iterator[_Event]:
        item, place = self._items[-1], self._place
        if item["type"] == "message":
            (part,) = item["content"]
            part["logprobs"] += self._logprobs
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {"type": "response.output_text.done", **place, **text}
            yield {"type": "response.content_part.done", **place, "part": part}
        else:
            rest = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **rest}
        item["status"] = status
        done = {"output_index": place["output_index"], "item": item}
        yield {"type": "response.output_item.done", **done}
