"""Conversion of a request's JSON body into the engine's requests.

The event loop parses the body and checks its fields (`parse`). Worker threads apply the template,
tokenize, and check limits and grammar (`prepare`), so that these do not delay other texts.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from tgen.config import SamplingConfig
from tgen.config.option import suggest
from tgen.errors import ModelError
from tgen.generation.random_numbers import row_seed, sample_seed
from tgen.generation.sequence import Request
from tgen.loaded_model import LoadedModel
from tgen.serve.http_error import bad_request, model_not_found

MAX_CHOICES = 128  # texts per prompt, as in OpenAI's API
_MAX_STOPS, _MAX_STOP_BYTES = 4, 256
_MAX_SCHEMA_BYTES = 1 << 16  # compiled grammars and their schemas are cached
_TINY = 5e-324  # the lowest top_p: only the most likely token is left
# Fields that have no influence on the text.
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "verbosity", "reasoning_effort"),
}
# Fields that tgen does not support -> the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "logit_bias": ({},),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), ()),
}
_COMPLETION_TOKENS = 16  # OpenAI's default
_MAX_COMPOSED = 4  # maximum number of characters that a normalizer composes into one
# As in OpenAI's API, penalties ignore the prompt, and a text must fit the context.
_FIXED = {"penalize_prompt": False, "overflow": "error"}
_SAMPLING = (  # fields that SamplingConfig has, too
    *("temperature", "top_p", "top_k", "min_p", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
# Type of an error -> what is expected.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "string_unicode": "text without unpaired surrogates",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "at least {ge:,}",
    "less_than_equal": "at most {le:,}",
    "too_short": "a value that is not empty",
    "literal_error": "{expected}",
    "value_error": "{error}",  # of a field's own validator
}


class JsonObject(BaseModel):
    """A JSON object with the declared fields; others are ignored.

    Types are strict: strings and booleans are not accepted as numbers.
    """

    model_config = ConfigDict(strict=True, frozen=True)


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text without unpaired surrogates") from None
    return text


def _check_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a string, a list of strings, a list of ids or a list of those."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    is_list = isinstance(prompts, list) and prompts != []
    if not is_list or not all(isinstance(one, str) or _is_ids(one) for one in prompts):
        raise ValueError(
            "a string, a list of strings, a list of token ids, or a list of such lists"
        )
    return [_check_unicode(one) if isinstance(one, str) else one for one in prompts]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(i) is int for i in value)


def _check_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    is_list = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_list or not all(
        isinstance(stop, str) and 1 <= len(_check_unicode(stop).encode()) <= _MAX_STOP_BYTES
        for stop in stops
    ):
        raise ValueError(f"up to {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes")
    return list(stops)


def _check_size(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema)) > _MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of up to {_MAX_SCHEMA_BYTES:,} bytes")
    return schema


def _list_parts(content: Any) -> Any:
    if not isinstance(content, (str, list)):
        raise ValueError("a string or a list of text parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Unicode = Annotated[str, AfterValidator(_check_unicode)]
_ITEMS = Field(min_length=1, fail_fast=True)  # an error per item of a long list would take seconds


class _TextPart(JsonObject):
    type: Literal["text"]
    text: _Unicode


class _Message(JsonObject, extra="forbid"):
    role: Annotated[_Unicode, Field(min_length=1)]
    content: Annotated[list[_TextPart], _ITEMS, BeforeValidator(_list_parts)]
    name: Any = None  # no template uses it

    @property
    def plain(self) -> dict[str, str]:
        """Role and text, for the chat template."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        """Drop what clients send with every message."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value not in (None, [])}


class _StreamOptions(JsonObject):
    include_usage: bool | None = None


_Schema = Annotated[dict[str, Any], AfterValidator(_check_size)]


class _JsonSchema(JsonObject, extra="forbid"):
    definition: _Schema = Field(alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None  # every text satisfies the schema


class _ResponseFormat(JsonObject, extra="forbid"):
    type: str = ""
    json_schema: _JsonSchema | None = None
    # for json_object, as in llama.cpp
    definition: Annotated[_Schema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        lacks_schema = self.type == "json_schema" and not self.json_schema
        if lacks_schema or self.type not in ("text", "json_object", "json_schema"):
            raise ValueError("the type text, json_object, or json_schema with a schema")
        if self.json_schema and self.type != "json_schema":
            raise ValueError(f"no json_schema beside the type {self.type}")
        if self.definition is not None and self.type != "json_object":
            raise ValueError(f"no schema beside the type {self.type}")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema that the text must satisfy; None for any text."""
        if self.type == "json_schema" and self.json_schema:
            return self.json_schema.definition
        if self.type != "json_object":
            return None
        return {"type": "object"} if self.definition is None else self.definition


class _TextRequest(JsonObject):
    """The fields that both endpoints have."""

    model: str
    n: _Choices = 1  # texts per prompt
    max_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1
    top_p: _Fraction = 1
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    min_p: _Fraction = 0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    frequency_penalty: _Penalty = 0
    presence_penalty: _Penalty = 0
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] = 1
    stop: Annotated[list[str], PlainValidator(_check_stops)] | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    response_format: _ResponseFormat = _ResponseFormat(type="text")

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise bad_request("stream_options needs stream", "stream_options")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingConfig that the request sets, besides seed, limit and logprobs."""
        given = [name for name in _SAMPLING if name in self.model_fields_set]
        sampling = {name: getattr(self, name) for name in given}
        if "top_p" in sampling:
            sampling["top_p"] = max(self.top_p, _TINY)
        if "top_k" in sampling:
            sampling["top_k"] = max(self.top_k, 0)  # vLLM's -1 disables it, too
        if (schema := self.response_format.schema_of_text) is not None:
            sampling["json_schema"] = schema
        return sampling


class CompletionRequest(_TextRequest):
    """The body of /v1/completions."""

    chat: ClassVar[bool] = False
    prompt: Annotated[list[str | list[int]], PlainValidator(_check_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: _Choices | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of not in (None, self.n):
            message = f"best_of: not supported unless it equals n (got {self.best_of})"
            raise bad_request(message, "best_of")
        if self.echo and self.logprobs is not None:
            message = "echo cannot be combined with logprobs"
            raise bad_request(message, "echo", "unsupported_parameter")
        return self

    @property
    def n_texts(self) -> int:
        """Number of texts over all prompts."""
        return self.n * len(self.prompt)

    @property
    def n_top(self) -> int | None:
        """Number of top tokens in the answer per position; None without logprobs."""
        return self.logprobs


class ChatRequest(_TextRequest):
    """The body of /v1/chat/completions."""

    chat: ClassVar[bool] = True
    messages: Annotated[list[_Message], _ITEMS]
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs", "top_logprobs")
        if self.messages[-1].role == "assistant":
            raise bad_request(
                "messages: the last one is of the assistant, so nothing is left to answer; "
                "remove it",
                "messages",
            )
        return self

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages for the chat template."""
        return [message.plain for message in self.messages]

    @property
    def n_texts(self) -> int:
        """Number of texts."""
        return self.n

    @property
    def n_top(self) -> int | None:
        """As in CompletionRequest."""
        return self.top_logprobs if self.logprobs else None


TextRequest = CompletionRequest | ChatRequest


def parse(body: bytes, kind: type[TextRequest], model: str) -> TextRequest:
    """Parse the body of a request; `model` is the id that is served.

    Raises HttpError, and RecursionError for a body that is nested too deeply.
    """
    try:
        values = json.loads(body.decode(), parse_constant=_reject_constant)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise bad_request('the body is not a JSON object such as {"prompt": "What is"}')
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
        if name not in {*kind.model_fields, *_NEUTRAL, *_IGNORED}:
            hint = suggest(name[:60], [*kind.model_fields, *_NEUTRAL, *_IGNORED])
            message = f"unknown field {name[:60]!r}" + (f": {hint}" if hint else "")
            raise bad_request(message, name[:60], "unknown_parameter")
    try:
        request = kind.model_validate({"model": model} | given)
    except ValidationError as error:
        path, message = _explain(error)
        raise bad_request(message, path) from None
    if request.model != model:
        raise model_not_found(request.model, model)
    return request


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise HttpError for the first id of a prompt that the model does not have."""
    for i in ids:
        if not 0 <= i < vocab_size:
            message = f"prompt: invalid token id {i if abs(i) < 2**63 else 'beyond 64 bits'}"
            raise bad_request(f"{message}, expected ids below {vocab_size:,}", "prompt")


class PreparedTexts(NamedTuple):
    """The engine's requests, `n` per prompt, and what the answer says about the prompts."""

    requests: list[Request]
    prompt_tokens: int  # over all prompts
    echoes: list[str]  # per prompt, if requested


def prepare(model: LoadedModel, request: TextRequest, max_tokens: int) -> PreparedTexts:
    """Encode the prompts and check that each text can be generated.

    Without a seed, one is chosen. Text c of prompt p has the seed of the text that `tgen generate`
    gives as sample c of row p. Raises HttpError and TgenError.
    """
    seed = secrets.randbelow(1 << 32) if request.seed is None else request.seed
    prompts, ends = _encode(model, request)
    requests: list[Request] = []
    echoes: list[str] = []
    for p, ids in enumerate(prompts):
        options = model.defaults | request.sampling | {"logprobs": request.n_top or 0} | _FIXED
        options["max_new_tokens"] = _count(model, request, len(ids), max_tokens)
        try:
            sampling = SamplingConfig(**options, seed=row_seed(seed, p))
            first = model.request(ids, sampling, ends)
        except RecursionError:
            raise bad_request("the nesting is too deep", "response_format") from None
        for c in range(request.n):
            other = sampling.with_seed(sample_seed(sampling.seed, c))
            requests.append(first._replace(sampling=other))
        if isinstance(request, CompletionRequest) and request.echo:
            prompt = request.prompt[p]
            decoded = model.tokenizer.decode(ids).decode(errors="replace")
            echoes.append(prompt if isinstance(prompt, str) else decoded)
    return PreparedTexts(requests, sum(map(len, prompts)), echoes)


def _encode(model: LoadedModel, request: TextRequest) -> tuple[list[list[int]], frozenset[int]]:
    """Return the ids of each prompt, and the tokens that end a text besides the model's own."""
    if isinstance(request, ChatRequest):
        try:
            chat = model.chat_format
        except ModelError:
            message = (
                f"the model {request.model!r} has no usable chat template; use /v1/completions, or "
                "a model with a chat template"
            )
            raise bad_request(message, "messages", "no_template") from None
        return [chat.encode(request.conversation)], chat.end_ids
    prompts = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            _check_characters(model, prompt)
            prompts.append(model.encode(prompt))
        else:
            check_ids(prompt, model.tokenizer.vocab_size)
            prompts.append(prompt)
    return prompts, frozenset()


def _check_characters(model: LoadedModel, prompt: str) -> None:
    """Raise HttpError for a prompt that cannot fit the context, before it is encoded."""
    length = model.engine.context_length
    if len(prompt) <= length:
        return
    longest = max(map(len, model.vocabulary.tokens))
    n = len("".join(prompt.split()))  # some tokenizers drop white space
    if n > length * longest * _MAX_COMPOSED:
        message = f"a prompt of {n:,} characters does not fit the context of {length:,} tokens"
        raise bad_request(message, "prompt", "context_length_exceeded")


def _count(model: LoadedModel, request: TextRequest, n_prompt: int, max_tokens: int) -> int:
    """Return the maximum number of new tokens of a prompt's texts, which fit in the context."""
    length, requested = model.engine.context_length, request.max_tokens
    if isinstance(request, ChatRequest):
        requested = request.max_completion_tokens or requested
    if requested is not None and requested > max_tokens:
        message = f"max_tokens: invalid value {requested}, expected at most {max_tokens:,}"
        raise bad_request(message, "max_tokens")
    room = length + 1 - n_prompt  # a full context still predicts one more token
    if room < (requested or 1):
        needed = f" and {requested:,} new tokens do" if requested else " does"
        raise bad_request(
            f"a prompt of {n_prompt:,} tokens{needed} not fit the context of {length:,} tokens",
            "messages" if request.chat else "prompt",
            "context_length_exceeded",
        )
    default = max_tokens if request.chat else min(_COMPLETION_TOKENS, max_tokens)
    return requested if requested is not None else min(default, room)


def _explain(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first invalid field, and its value and what is expected there."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:60]}" for step in first["loc"])
    path = "".join(steps).removeprefix(".")
    if kind in ("missing", "extra_forbidden"):
        return path, f"{path} is {'missing' if kind == 'missing' else 'not supported'}"
    expected = _EXPECTED.get(kind, first["msg"]).format(**first.get("ctx", {}))
    expected = expected.removesuffix(".0")  # limits of floats
    return path, f"{path}: invalid value {json.dumps(first['input'])[:60]}, expected {expected}"
