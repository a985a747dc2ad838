"""From the JSON body of a request to the engine's requests.

The body is parsed and every field checked; then come template, tokens, limits and grammar. All this
runs in worker threads: a long text, a slow template or a large schema delays nobody's tokens.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from tgen.config import SamplingConfig
from tgen.config.option import suggest
from tgen.errors import ModelError
from tgen.generation.random_numbers import row_seed, sample_seed
from tgen.generation.sequence import Request
from tgen.loaded_model import LoadedModel
from tgen.serve.http_error import HttpError, bad_request, model_not_found

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
_SAMPLING = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
_COMPLETION_TOKENS = 16  # OpenAI's default
_MAX_COMPOSED = 4  # maximum number of characters that a normalizer composes into one
# As in OpenAI's API, penalties ignore the prompt, and a text must fit the context.
_FIXED = {"penalize_prompt": False, "overflow": "error"}


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A checked request for texts: of prompts, or of the next message of a chat."""

    model: str  # the name in the API
    chat: bool
    prompts: list[str | list[int]]  # empty in a chat
    messages: list[dict[str, str]]  # empty without a chat
    n: int  # texts per prompt
    max_tokens: int | None
    seed: int | None
    sampling: dict[str, Any]  # other fields of SamplingConfig
    logprobs: bool
    stream: bool
    include_usage: bool  # as the last event of a stream
    echo: bool

    @property
    def n_texts(self) -> int:
        """Number of texts over all prompts."""
        return self.n * max(1, len(self.prompts))


class _Field(NamedTuple):
    """Which values a field may have."""

    is_valid: Callable[[Any], bool]
    expected: str


def _number(low: float, high: float) -> _Field:
    return _Field(
        lambda value: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        ),
        f"a number from {low:g} to {high:g}",
    )


def _whole(low: int, high: int, limit: str = "") -> _Field:
    return _Field(
        lambda value: type(value) is int and low <= value <= high,
        f"a whole number from {low} to {limit or f'{high:,}'}",
    )


_FLAG = _Field(lambda value: isinstance(value, bool), "true or false")
_ANY = _Field(lambda _: True, "")  # checked on its own
_COUNT = _whole(1, 2**31 - 1, "2^31 - 1")
_FIELDS = {
    "model": _Field(lambda value: isinstance(value, str), "the id of a model"),
    "n": _whole(1, MAX_CHOICES),
    "max_tokens": _COUNT,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(-1, 2**31 - 1, "2^31 - 1"),
    "min_p": _number(0, 1),
    "seed": _whole(0, 2**63 - 1, "2^63 - 1"),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.001, 1000),
    "stop": _ANY,
    "stream": _FLAG,
    "stream_options": _ANY,
    "response_format": _ANY,
}
_COMPLETION_FIELDS = _FIELDS | {
    "prompt": _ANY,
    "logprobs": _whole(0, 5),
    "echo": _FLAG,
    "best_of": _whole(1, MAX_CHOICES),
}
_CHAT_FIELDS = _FIELDS | {
    "messages": _ANY,
    "max_completion_tokens": _COUNT,
    "logprobs": _FLAG,
    "top_logprobs": _whole(0, 20),
}


def parse_completion(body: bytes, model: str) -> TextRequest:
    """Parse the body of /v1/completions; `model` is the id that is served.

    Raises HttpError, and RecursionError for a body that is nested too deeply.
    """
    values = _parse(body, _COMPLETION_FIELDS, model)
    n, best_of = values.get("n", 1), values.get("best_of")
    if best_of not in (None, n):
        raise bad_request(f"best_of: not supported unless it equals n (got {best_of})", "best_of")
    echo, logprobs = values.get("echo", False), values.get("logprobs")
    if echo and logprobs is not None:
        raise bad_request("echo cannot be combined with logprobs", "echo", "unsupported_parameter")
    return TextRequest(
        model=model,
        chat=False,
        prompts=_check_prompts(values.get("prompt")),
        messages=[],
        max_tokens=values.get("max_tokens"),
        logprobs=logprobs is not None,
        echo=echo,
        **_common(values, logprobs or 0),
    )


def parse_chat(body: bytes, model: str) -> TextRequest:
    """Parse the body of /v1/chat/completions, as `parse_completion` does."""
    values = _parse(body, _CHAT_FIELDS, model)
    logprobs, n_top = values.get("logprobs", False), values.get("top_logprobs", 0)
    if n_top and not logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    return TextRequest(
        model=model,
        chat=True,
        prompts=[],
        messages=_check_messages(values.get("messages")),
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens")),
        logprobs=logprobs,
        echo=False,
        **_common(values, n_top),
    )


def _common(values: Mapping[str, Any], n_top: int) -> dict[str, Any]:
    """Return the fields of TextRequest that both kinds of request share."""
    stream = values.get("stream", False)
    return {
        "n": values.get("n", 1),
        "seed": values.get("seed"),
        "sampling": _sampling(values) | {"logprobs": n_top},
        "stream": stream,
        "include_usage": _check_stream_options(values.get("stream_options"), stream=stream),
    }


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingConfig that the request sets."""
    sampling: dict[str, Any] = {n: float(values[n]) for n in _SAMPLING if n in values}
    if "top_p" in sampling:
        sampling["top_p"] = max(sampling["top_p"], _TINY)
    if "top_k" in values:
        sampling["top_k"] = max(values["top_k"], 0)  # vLLM's -1 disables it, too
    if "repetition_penalty" in values:
        sampling["repetition_penalty"] = float(values["repetition_penalty"])
    if "stop" in values:
        sampling["stop"] = _check_stops(values["stop"])
    schema = _check_response_format(values.get("response_format"))
    if schema is not None:
        sampling["json_schema"] = schema
    return sampling


def _parse(body: bytes, fields: Mapping[str, _Field], model: str) -> dict[str, Any]:
    """Parse an object; return its fields that are not null and have an influence."""
    try:
        values = json.loads(body.decode(), parse_constant=_reject_constant)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise bad_request('the body is not a JSON object such as {"prompt": "What is"}')
    given = {name: value for name, value in values.items() if value is not None}
    checked = {}
    for name, value in given.items():
        if name in fields:
            field = fields[name]
            if not field.is_valid(value):
                raise _invalid(name, value, field.expected)
            checked[name] = value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
        elif name not in _IGNORED:
            hint = suggest(name, [*fields, *_NEUTRAL, *_IGNORED])
            message = f"unknown field {name[:60]!r}" + (f": {hint}" if hint else "")
            raise bad_request(message, name[:60], "unknown_parameter")
    if checked.get("model", model) != model:
        raise model_not_found(checked["model"], model)
    return checked


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _check_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a string, a list of strings, a list of ids or a list of those."""
    expected = "a string, a list of strings, a list of token ids, or a list of such lists"
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise _invalid("prompt", value, expected)
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_unicode("prompt", prompt)
        elif not _is_ids(prompt):
            raise _invalid("prompt", value, expected)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(i) is int for i in value)


def _check_messages(value: Any) -> list[dict[str, str]]:
    """Return messages that have exactly a role and a text."""
    if not isinstance(value, list) or not value:
        raise _invalid("messages", value, 'a list such as [{"role": "user", "content": "Hi"}]')
    messages = []
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _invalid(where, message, 'an object such as {"role": "user", "content": "Hi"}')
        given = {name for name, part in message.items() if part not in (None, [])}
        if unknown := sorted(given - {"role", "content", "name"}):
            raise bad_request(f"{where}.{unknown[0][:60]} is not supported", where)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _invalid(f"{where}.role", role, "a role such as user or assistant")
        content = _join_parts(f"{where}.content", message.get("content"))
        for text in (role, content):
            _check_unicode(where, text)
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    if messages[-1]["role"] == "assistant":
        raise bad_request(
            "messages: the last one is of the assistant, so nothing is left to answer; remove it",
            "messages",
        )
    return messages


def _join_parts(where: str, content: Any) -> str:
    """Return the text of a message, which may be a list of parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise _invalid(where, content, "a string or a list of text parts")
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise _invalid(where, content, 'text parts such as {"type": "text", "text": "Hi"}')
        texts.append(part["text"])
    return "".join(texts)


def _check_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    expected = f"up to {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes"
    is_list = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_list or not all(isinstance(stop, str) for stop in stops):
        raise _invalid("stop", value, expected)
    for stop in stops:
        _check_unicode("stop", stop)
        if not 1 <= len(stop.encode()) <= _MAX_STOP_BYTES:
            raise _invalid("stop", value, expected)
    return list(stops)


def _check_stream_options(value: Any, *, stream: bool) -> bool:
    """Return whether the stream ends with the usage."""
    if value is None:
        return False
    if not isinstance(value, dict):
        raise _invalid("stream_options", value, 'an object such as {"include_usage": true}')
    if not stream:
        raise bad_request("stream_options needs stream", "stream_options")
    include = value.get("include_usage")
    if not isinstance(include, (bool, type(None))):
        raise _invalid("stream_options.include_usage", include, "true or false")
    return bool(include)


def _check_response_format(value: Any) -> dict[str, Any] | None:
    """Return the JSON schema of the text; None for any text."""
    expected = "an object of the type text, json_object or json_schema"
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise _invalid("response_format", value, expected)
    outer = value.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        name = "response_format.json_schema"
        raise _invalid(name, outer, 'an object such as {"name": "answer", "schema": {...}}')
    if len(json.dumps(schema)) > _MAX_SCHEMA_BYTES:
        message = f"the schema is too large (limit {_MAX_SCHEMA_BYTES:,} bytes)"
        raise bad_request(message, "response_format")
    return schema


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name}: unpaired surrogate", name) from None


def _invalid(name: str, value: Any, expected: str) -> HttpError:
    shown = json.dumps(value)[:60]
    return bad_request(f"{name}: invalid value {shown}, expected {expected}", name)


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
        options = model.defaults | request.sampling | _FIXED
        options["max_new_tokens"] = _count(model, request, len(ids), max_tokens)
        try:
            sampling = SamplingConfig(**options, seed=row_seed(seed, p))
            first = model.request(ids, sampling, ends)
        except RecursionError:
            raise bad_request("the nesting is too deep", "response_format") from None
        for c in range(request.n):
            other = sampling.with_seed(sample_seed(sampling.seed, c))
            requests.append(first._replace(sampling=other))
        if request.echo:
            prompt = request.prompts[p]
            decoded = model.tokenizer.decode(ids).decode(errors="replace")
            echoes.append(prompt if isinstance(prompt, str) else decoded)
    return PreparedTexts(requests, sum(map(len, prompts)), echoes)


def _encode(model: LoadedModel, request: TextRequest) -> tuple[list[list[int]], frozenset[int]]:
    """Return the ids of each prompt, and the tokens that end a text besides the model's own."""
    if request.chat:
        try:
            chat = model.chat_format
        except ModelError:
            message = (
                f"the model {request.model!r} has no usable chat template; use /v1/completions, or "
                "a model with a chat template"
            )
            raise bad_request(message, "messages", "no_template") from None
        return [chat.encode(request.messages)], chat.end_ids
    prompts = []
    for prompt in request.prompts:
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
