"""Requests for texts: the bodies of /v1/completions and /v1/chat/completions.

The event loop parses a body and checks its fields here; `serve.preparation` makes the engine's
requests of it.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr, model_validator

from tgen.errors import suggest
from tgen.serve.http_error import HttpError, bad_request
from tgen.serve.json_body import (
    JsonObject,
    Unicode,
    Whole,
    check_unicode,
    is_ids,
    list_parts,
    load_object,
    validate,
)
from tgen.serve.sampling_fields import SamplingFields, rename_aliases
from tgen.serve.tool_fields import ToolCall, ToolChoice, ToolChoiceField, ToolsField

MAX_CHOICES = 128  # texts per prompt, as in OpenAI's API
# Fields that have no influence on the text.
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "verbosity", "reasoning_effort"),
    *("cache_prompt", "id_slot", "priority", "request_id", "guided_decoding_backend"),
    *("mirostat_tau", "mirostat_eta", "dynatemp_exponent"),  # of samplers that are not supported
}
# Fields -> the values that ask for nothing. Other values are errors, unless it is a declared field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "logit_bias": ({},),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "early_stopping"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("mirostat", "dynatemp_range"), (0,)),
    **dict.fromkeys(("penalize_newline", "penalize_nl"), (True,)),
    "tfs_z": (1,),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    **dict.fromkeys(("chat_template", "prompt_logprobs"), ()),
    "chat_template_kwargs": ({},),
    "length_penalty": (1,),
}
# Fields of a message that are not supported -> what is expected.
_UNSUPPORTED = {"audio": "text, no audio", "function_call": "tool_calls, not function_call"}
# Options of SamplingConfig that cannot be combined with the grammar of calls.
_AGAINST_TOOLS = {"require", "regex", "choices", "grammar"}
_NEWER_LIMIT = "max_completion_tokens"  # of a chat, before max_tokens
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}


def _check_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a string, a list of strings, a list of ids or a list of those."""
    prompts = [value] if _is_prompt(value) else value
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise ValueError(
            "a string, a list of strings, a list of token ids, or a list of such lists"
        )
    return [check_unicode(one) if isinstance(one, str) else one for one in prompts]


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    return isinstance(value, str) or (value != [] and is_ids(value))


_Count = Annotated[Whole, Field(ge=-1, le=2**31 - 1)]  # -1: as many as fit
_Choices = Annotated[Whole, Field(ge=1, le=MAX_CHOICES)]
_ITEMS = Field(min_length=1, fail_fast=True)  # an error per item of a long list would take seconds


class _TextPart(JsonObject):
    type: Literal["text"]
    text: Unicode


class _Message(JsonObject):
    """A message. Other fields, which clients add for themselves, are ignored."""

    role: Annotated[Unicode, Field(min_length=1)]
    content: Annotated[list[_TextPart], _ITEMS, BeforeValidator(partial(list_parts, kind="text"))]
    tool_calls: list[ToolCall] = Field(default_factory=list, fail_fast=True)
    tool_call_id: Unicode | None = None
    name: Any = None  # templates use that of a tool only

    @property
    def for_template(self) -> dict[str, Any]:
        """The message for the chat template."""
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": "".join(p.text for p in self.content)}
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        """Drop what clients send with every message. A message of the assistant that only calls, or
        the result of a call, may have no content."""
        if not isinstance(values, dict):
            return values
        for name in _UNSUPPORTED.keys() & values.keys():
            if values[name] is not None:
                raise ValueError(_UNSUPPORTED[name])
        given = {name: value for name, value in values.items() if value is not None}
        if given.get("role") in ("assistant", "tool") and given.get("content") in (None, []):
            given["content"] = ""
        return given

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls in messages of the role assistant, not {self.role[:40]}")
        return self


class _StreamOptions(JsonObject):
    include_usage: bool | None = None


class _TextRequest(SamplingFields):
    """The fields that both endpoints have."""

    chat: ClassVar[bool]
    default_tokens: ClassVar[int | None]  # of a text without max_tokens; None: as many as fit
    model: str
    n: _Choices = 1  # texts per prompt
    max_tokens: _Count | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    # The client's names of fields, or of parts of them, that have other names here.
    _sent_names: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def per_prompt(self) -> int:
        """Number of texts to generate per prompt, of which the answer has the `n` best."""
        return self.n

    @property
    def n_texts(self) -> int:
        """Number of texts to generate over all prompts."""
        return self.per_prompt

    @property
    def n_top_of_prompt(self) -> int | None:
        """Number of top tokens in the answer per token of the prompt; None without logprobs."""
        return None

    @property
    def names(self) -> dict[str, str]:
        """The client's names of fields, and of the options of SamplingConfig that they set."""
        options = {"max_new_tokens": "max_tokens"} | super().names
        sent = self._sent_names
        return sent | {option: sent.get(field, field) for option, field in options.items()}

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise bad_request("stream_options needs stream", "stream_options")
        return self


class CompletionRequest(_TextRequest):
    """The body of /v1/completions."""

    chat: ClassVar[bool] = False
    default_tokens: ClassVar[int | None] = 16  # as in OpenAI's API
    prompt: Annotated[list[str | list[int]], PlainValidator(_check_prompts)]
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: _Choices | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.per_prompt < self.n:
            message = f"best_of: invalid value {self.best_of}, expected at least n ({self.n})"
            raise bad_request(message, "best_of")
        if self.stream and self.per_prompt > self.n:
            raise bad_request("best_of cannot be combined with stream", "best_of")
        return self

    @property
    def per_prompt(self) -> int:
        """Number of texts to generate per prompt: best_of, or n."""
        return self.best_of or self.n

    @property
    def n_texts(self) -> int:
        """Number of texts to generate over all prompts."""
        return self.per_prompt * len(self.prompt)

    @property
    def n_top(self) -> int | None:
        """Number of top tokens in the answer per position; None without logprobs."""
        return self.logprobs

    @property
    def n_top_of_prompt(self) -> int | None:
        """Number of top tokens in the answer per token of the prompt; None without logprobs or
        echo."""
        return self.logprobs if self.echo else None


class ChatRequest(_TextRequest):
    """The body of /v1/chat/completions."""

    chat: ClassVar[bool] = True
    default_tokens: ClassVar[int | None] = None
    needs_template: ClassVar[bool] = True  # else one message can be the prompt
    messages: Annotated[list[_Message], _ITEMS]
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    tools: ToolsField = Field(default_factory=list)
    tool_choice: ToolChoiceField = ToolChoice("auto")
    parallel_tool_calls: bool = True
    # As in vLLM; by default, a last message of the assistant is continued.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs", "top_logprobs")
        if self.tool_choice.mode == "required" and not self.tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("tools: two have the same name", "tools")
        for option in _AGAINST_TOOLS & self.sampling.keys() if self.calls_tools else ():
            if self.sampling[option]:
                name = super().names.get(option, option)
                raise bad_request(f"{name} cannot be combined with tools", name)
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "continue_final_message cannot be combined with add_generation_prompt"
                raise bad_request(message, "continue_final_message")
            if self.messages[-1].role != "assistant":
                message = "continue_final_message: the last message is not of the assistant"
                raise bad_request(message, "continue_final_message")
        if self.is_continued and (self.messages[-1].tool_calls or self.calls_tools):
            message = "messages: a last message of the assistant cannot be continued with tools"
            raise bad_request(message, "messages")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages for the chat template; a result has the name of its function."""
        plain = [message.for_template for message in self.messages]
        names = {call.id: call.function.name for m in self.messages for call in m.tool_calls}
        for message in plain:
            if message.get("tool_call_id") in names:
                message["name"] = names[message["tool_call_id"]]
        return plain

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template."""
        return [tool.for_template for tool in self.tools] if self.calls_tools else None

    @property
    def constraint(self) -> str | None:
        """The request's field that constrains the text, if any: tools if the answer may call."""
        return "tools" if self.calls_tools else super().constraint

    @property
    def text_constraint(self) -> str | None:
        """The request's field that constrains a text without calls, if any."""
        return super().constraint

    @property
    def names(self) -> dict[str, str]:
        """The client's names of fields, and of the options of SamplingConfig that they set; `tools`
        sets those that constrain calls."""
        calls = {"grammar": "tools"} if self.calls_tools else {}
        if self.calls_tools and self.tool_choice.mode == "required":
            calls["json_schema"] = "tools"  # otherwise, that of a text without calls
        return super().names | calls

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues the last message."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].role == "assistant" and not self.add_generation_prompt

    @property
    def starts_answer(self) -> bool:
        """Whether the prompt ends with the template's start of an answer."""
        return not self.is_continued and self.add_generation_prompt is not False

    @property
    def n_top(self) -> int | None:
        """Number of top tokens in the answer per position; None without logprobs."""
        return self.top_logprobs if self.logprobs else None


TextRequest = CompletionRequest | ChatRequest


_Kind = TypeVar("_Kind", bound=_TextRequest)


def parse(body: bytes, kind: type[_Kind], model: str) -> _Kind:
    """Parse the body of a request; `model` is the id of the model if it names none.

    Raises HttpError, and RecursionError for a body that is nested too deeply.
    """
    return to_request(load_object(body), kind, model)


def to_request(
    given: dict[str, Any],
    kind: type[_Kind],
    model: str,
    names: Mapping[str, str] = MappingProxyType({}),
) -> _Kind:
    """Return the request with the given fields, which it may rename; raises HttpError.

    `names`: the client's names of fields, or of parts of them, that have other names here.
    """
    sent = {**names}
    try:
        for name, alias in rename_aliases(given).items():
            sent[name] = sent.get(alias, alias)
        if kind.chat and _NEWER_LIMIT in given:
            given["max_tokens"] = given.pop(_NEWER_LIMIT)
            sent["max_tokens"] = sent.get(_NEWER_LIMIT, _NEWER_LIMIT)
        _drop_without_effect(given, kind)
        request = validate(kind, {"model": model} | given)
    except HttpError as error:
        error.use_names(sent)
        raise
    request._sent_names.update(sent)
    return request


def _drop_without_effect(given: dict[str, Any], kind: type[_TextRequest]) -> None:
    """Remove the fields that ask for nothing; raises HttpError for unknown ones."""
    has_tools = "tools" in kind.model_fields
    for name, value in [*given.items()]:
        if value in _NEUTRAL.get(name, ()) and not (name == "tool_choice" and has_tools):
            del given[name]
        elif name in _NEUTRAL and name not in kind.model_fields:
            other = f"; use {_INSTEAD[name]}" if name in _INSTEAD and has_tools else ""
            raise bad_request(f"{name} is not supported{other}", name, "unsupported_parameter")
        elif name not in {*kind.model_fields, *_NEUTRAL, *_IGNORED}:
            newer = [_NEWER_LIMIT] if kind.chat else []
            hint = suggest(name[:60], [*kind.model_fields, *newer])
            message = f"unknown field {name[:60]!r}" + (f": {hint}" if hint else "")
            raise bad_request(message, name[:60], "unknown_parameter")
