"""Ollama's API: its requests become chats and completions, its answers are lines of JSON."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, model_validator

from tgen.errors import ModelError
from tgen.loaded_model import LoadedModel
from tgen.serve.engine_thread import Job
from tgen.serve.http_error import HttpError, bad_request
from tgen.serve.http_response import OpenAIForm, dump_json
from tgen.serve.json_body import JsonObject, Objects, Unicode, load_object, validate
from tgen.serve.models import tagged
from tgen.serve.sampling_fields import SamplingFields
from tgen.serve.text_request import ChatRequest, CompletionRequest, TextRequest, to_request

VERSION = "0.8.0"  # of the API, for clients that ask for a minimum
_NEVER = "9999-12-31T23:59:59Z"
_UNSUPPORTED = ("suffix", "images", "template", "context", "think", "logprobs", "top_logprobs")
# Options of the engine, which the server's own options decide.
_IGNORED = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap"),
    *("use_mlock", "low_vram", "vocab_only", "f16_kv", "logits_all", "embedding_only", "num_gqa"),
    *("rope_frequency_base", "rope_frequency_scale"),
}
# Fields of OpenAI's API that are beside Ollama's options, or have other names.
_NO_OPTIONS = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {
    *SamplingFields.model_fields
}
_NO_OPTIONS |= {"max_completion_tokens", "n_predict", "response_format"}


def _check_images(images: list[Any]) -> list[Any]:
    if images:
        raise ValueError("no images")
    return images


class _Message(JsonObject):
    role: Unicode
    content: Unicode = ""
    images: Annotated[list[Any], AfterValidator(_check_images)] = Field(default_factory=list)
    tool_calls: Objects = Field(default_factory=list)
    tool_call_id: Unicode = ""
    tool_name: Unicode = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Drop the fields without a value, as Ollama does."""
        return {name: value for name, value in values.items() if value is not None}


# Fields that the AI SDK's provider of Ollama puts beside the options -> the options they are.
_BESIDE = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "num_predict"}


class _Body(JsonObject, extra="forbid"):
    model: Unicode
    stream: bool = True
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None  # memory decides which models stay
    truncate: bool | None = None  # a prompt beyond the context is an error
    shift: bool | None = None  # the context ends a text
    temperature: Any = None  # each as the option in _BESIDE, which comes first
    top_p: Any = None
    max_output_tokens: Any = None


class _GenerateBody(_Body):
    prompt: Unicode = ""  # if empty, the model is only loaded
    system: Unicode = ""
    raw: bool = False


class _ChatBody(_Body):
    messages: Objects = Field(default_factory=list)  # without any, the model is only loaded
    tools: Objects | None = None
    tool_choice: Any = None  # of OpenAI's API; clients of both send it


class _PromptOrChat(ChatRequest):
    """A chat of one message, which is the prompt if the model has no chat template."""

    needs_template: ClassVar[bool] = False


def read_generate(body: bytes, model: str) -> tuple[TextRequest, "OllamaForm"]:
    """Return the request of a body of /api/generate, and the form of its answer.

    Raises HttpError.
    """
    request = validate(_GenerateBody, _load(body))
    values, names = _shared_fields(request)
    form = OllamaForm(request.model, chat=False, loads=not request.prompt)
    if not request.prompt:
        return _to_load(values, model, names), form
    if request.raw:
        values["prompt"] = request.prompt
        return to_request(values, CompletionRequest, model, names), form
    messages = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": request.prompt})
    names["messages"] = "prompt"
    return to_request(values | {"messages": messages}, _PromptOrChat, model, names), form


def read_chat(body: bytes, model: str) -> tuple[TextRequest, "OllamaForm"]:
    """Return the request of a body of /api/chat, and the form of its answer; raises HttpError."""
    request = validate(_ChatBody, _load(body))
    values, names = _shared_fields(request)
    form = OllamaForm(request.model, chat=True, loads=not request.messages)
    if not request.messages:
        return _to_load(values, model, names), form
    values["messages"] = _to_messages(request.messages)
    if request.tools:
        values["tools"] = request.tools
    if request.tool_choice is not None:
        values["tool_choice"] = request.tool_choice
    return to_request(values, ChatRequest, model, names), form


def _to_load(values: Mapping[str, Any], model: str, names: Mapping[str, str]) -> TextRequest:
    """Return a request that generates nothing, so that the model is only loaded."""
    load = to_request({**values, "prompt": [0]}, CompletionRequest, model, names)
    return load.model_copy(update={"max_tokens": 0, "require": []})


def _load(body: bytes) -> dict[str, Any]:
    values = load_object(body)
    for name in _UNSUPPORTED:
        if values.pop(name, None):
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    return values


def _shared_fields(request: _Body) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of OpenAI's API that both endpoints need, and Ollama's names of them."""
    options = request.options or {}
    for name in options.keys() & _NO_OPTIONS:
        raise bad_request(f"options.{name} is not supported", f"options.{name}")
    values = {
        name: value for name, value in options.items() if name not in _IGNORED and value is not None
    }
    names = {name: f"options.{name}" for name in (*values, "num_predict")}
    for name, option in _BESIDE.items():
        if option not in values and (value := getattr(request, name)) is not None:
            values[option], names[option] = value, name
    names["max_tokens"] = names.pop("num_predict")
    limit = values.pop("num_predict", None)
    values["max_tokens"] = -1 if limit in (None, -2) else limit  # as many as fit the context
    if request.format == "json":
        values["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        schema = {"schema": request.format}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.format not in (None, ""):
        raise bad_request('format: expected "json" or a JSON schema', "format")
    if request.format:
        names |= dict.fromkeys(("response_format", "response_format.json_schema.schema"), "format")
    if request.stream:
        values |= {"stream": True, "stream_options": {"include_usage": True}}
    return values | {"model": request.model}, names


def _to_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, in which a call has an id, and its arguments are text.

    A result belongs to the call of its id, or to the first unanswered one of its function, or to
    the first unanswered one.
    """
    result: list[dict[str, Any]] = []
    unanswered: dict[str, str] = {}  # ids of calls -> names of their functions
    for i, values in enumerate(messages):
        message = validate(_Message, values, f"messages[{i}]")
        result.append({"role": message.role, "content": message.content})
        if message.tool_calls:
            calls = [_to_call(call, f"call_{i}_{k}") for k, call in enumerate(message.tool_calls)]
            unanswered = {call["id"]: _function_name(call) for call in calls}
            result[-1]["tool_calls"] = calls
        if message.role == "tool":
            named = (name for name, of in unanswered.items() if of == message.tool_name)
            known = message.tool_call_id or next(named, None) or next(iter(unanswered), "call")
            unanswered.pop(known, None)
            result[-1]["tool_call_id"] = known
    return result


def _to_call(call: Mapping[str, Any], other_id: str) -> dict[str, Any]:
    """Return a call in OpenAI's form; `other_id` is its id if it has none."""
    given = call.get("id")
    name = given if isinstance(given, str) and given else other_id
    return {"id": name, "type": "function", "function": _to_function(call)}


def _function_name(call: Mapping[str, Any]) -> Any:
    function = call["function"]
    return function.get("name") if isinstance(function, dict) else None


def _to_function(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return function
    return {"name": function.get("name"), "arguments": json.dumps(function["arguments"])}


class OllamaForm(OpenAIForm):
    """The answers of /api/generate and /api/chat: one line of JSON per chunk of a stream."""

    content_type = "application/x-ndjson"

    def __init__(self, model: str, *, chat: bool, loads: bool = False) -> None:
        """`loads`: the request only loads the model."""
        self._model, self._chat, self._loads = model, chat, loads
        self._calls: dict[int, dict[str, str]] = {}  # as far as a stream has brought them
        self._finish = "stop"
        self._usage: dict[str, int] = {}

    def whole(self, answer: dict[str, Any], job: Job) -> dict[str, Any]:
        """Return the answer with its counts and durations."""
        text = self._add(answer)
        return self._line(text, done=True) | self._summary(job)

    def chunks(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Return a line per chunk that has text."""
        pieces = b""
        for chunk in chunks:
            if text := self._add(chunk):
                pieces += dump_json(self._line(text, done=False)) + b"\n"
        return pieces

    def end(self, job: Job) -> bytes:
        """Return the last line: tool calls, counts and durations."""
        return dump_json(self._line("", done=True) | self._summary(job)) + b"\n"

    def error(self, error: HttpError) -> bytes:
        """Return the line that ends a stream that fails."""
        return dump_json({"error": error.message}) + b"\n"

    def _add(self, chunk: Mapping[str, Any]) -> str:
        """Take note of a chunk, and return its text."""
        self._usage = chunk.get("usage") or self._usage
        text = ""
        for choice in chunk["choices"]:
            delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text += delta.get("content") or ""
            for i, call in enumerate(delta.get("tool_calls") or ()):
                empty = {"name": "", "arguments": ""}
                function = self._calls.setdefault(call.get("index", i), empty)
                for name in function:
                    function[name] += call["function"].get(name) or ""
            self._finish = choice["finish_reason"] or self._finish
        return text

    def _line(self, text: str, *, done: bool) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._model, "created_at": now}
        if not self._chat:
            return head | {"response": text, "done": done}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if done and (calls := [*self._complete_calls()]):
            message["tool_calls"] = calls
        return head | {"message": message, "done": done}

    def _complete_calls(self) -> Iterator[dict[str, Any]]:
        """Yield the calls without one whose arguments the limit of tokens has cut."""
        for call in self._calls.values():
            with suppress(ValueError, RecursionError):
                yield {"function": call | {"arguments": json.loads(call["arguments"])}}

    def _summary(self, job: Job) -> dict[str, Any]:
        if self._loads:
            return {"done_reason": "load"}
        now = time.perf_counter()
        started, first = job.started or now, job.first_token or now
        durations = {"total": now - job.submitted, "load": 0.0}
        durations |= {"prompt_eval": first - started, "eval": now - first}
        return {
            "done_reason": "length" if self._finish == "length" else "stop",
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "eval_count": self._usage.get("completion_tokens", 0),
            **{f"{name}_duration": int(value * 1e9) for name, value in durations.items()},
        }


def list_models(sizes: Mapping[str, int], created: float) -> dict[str, Any]:
    """Return the body of /api/tags for the sizes of models in bytes, by name.

    `created` is the start of the server in Unix time.
    """
    date = datetime.fromtimestamp(created, UTC).isoformat()
    facts = {"modified_at": date, "details": _details("", "")}
    return {"models": [{**_identity(name), "size": size, **facts} for name, size in sizes.items()]}


def list_loaded(models: Mapping[str, LoadedModel]) -> dict[str, Any]:
    """Return the body of /api/ps for the models in memory, by name; they do not expire."""
    return {
        "models": [
            {
                **_identity(name),
                "size": model.engine.weight_bytes,
                "context_length": model.engine.context_length,
                "details": _details(model.bundle.config.family, model.engine.dtype),
                "expires_at": _NEVER,
            }
            for name, model in models.items()
        ]
    }


def _identity(name: str) -> dict[str, str]:
    """Return a model's names and digest; as the name identifies it on this server, the digest is
    that of the name."""
    full = tagged(name)
    return {"name": full, "model": full, "digest": sha256(full.encode()).hexdigest()}


def show(model: LoadedModel, name: str, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of /api/show; no value of the request changes it."""
    config, family = model.bundle.config, model.bundle.config.family
    capabilities = ["completion"]
    with suppress(ModelError):  # no chat template
        capabilities += ["tools"] if model.chat_format.call_syntax else []
    return {
        "details": _details(family, model.engine.dtype),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            f"{family}.context_length": model.engine.context_length,
            f"{family}.embedding_length": config.d_model,
            f"{family}.block_count": config.n_layers,
        },
        "capabilities": capabilities,
    }


def _details(family: str, dtype: str) -> dict[str, Any]:
    families = [family] if family else []
    unknown = {"parent_model": "", "format": "", "parameter_size": ""}
    return {"family": family, "families": families, "quantization_level": dtype, **unknown}
