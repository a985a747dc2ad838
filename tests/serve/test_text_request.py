"""Fields of a request: what is accepted, and errors that name field and value."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tgen.serve.http_error import HttpError
from tgen.serve.text_request import ChatRequest, CompletionRequest, TextRequest, parse


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | fields).encode()


def test_an_answer_is_not_answered() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    with pytest.raises(HttpError, match="the last one is of the assistant") as error:
        parse(chat(messages=messages), ChatRequest, "m")
    assert error.value.status == 400


MESSAGES: list[tuple[type[TextRequest], dict[str, Any], str]] = [
    (CompletionRequest, {"n": 0}, "n: invalid value 0, expected at least 1"),
    (CompletionRequest, {"top_k": 2**31}, "top_k: invalid value 2147483648, expected at most 2,14"),
    (CompletionRequest, {"seed": 1.0}, "seed: invalid value 1.0, expected a whole number"),
    (CompletionRequest, {"min_p": "0"}, 'min_p: invalid value "0", expected a number'),
    (CompletionRequest, {"min_p": 10**400}, "min_p: invalid value 1000"),
    (CompletionRequest, {"echo": 1}, "echo: invalid value 1, expected true or false"),
    (CompletionRequest, {"stop": [""]}, 'stop: invalid value [""], expected up to 4 strings of'),
    (CompletionRequest, {"prompt": [[1], 2]}, "prompt: invalid value [[1], 2], expected a string"),
    (CompletionRequest, {"prompt": None}, "prompt is missing"),
    (CompletionRequest, {"tempature": 1}, "unknown field 'tempature': did you mean temperature?"),
    (CompletionRequest, {"messages": []}, "unknown field 'messages'"),
    (CompletionRequest, {"tool_choice": "any"}, "tool_choice is not supported"),
    (
        CompletionRequest,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage: invalid value 1, expected true or false",
    ),
    (
        CompletionRequest,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema is missing",
    ),
    (ChatRequest, {"messages": {}}, "messages: invalid value {}, expected a list"),
    (ChatRequest, {"messages": []}, "messages: invalid value [], expected a value that is not em"),
    (ChatRequest, {"messages": ["Hi"]}, 'messages[0]: invalid value "Hi", expected an object'),
    (ChatRequest, {"messages": [{"content": "Hi"}]}, "messages[0].role is missing"),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type: invalid value \"image_url\", expected 'text'",
    ),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": "Hi", "tool_calls": [1]}]},
        "messages[0].tool_calls is not supported",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "message"), MESSAGES, ids=lambda value: str(value)[:40])
def test_errors_say_which_field_has_which_value_and_what_is_expected(
    kind: type[TextRequest], fields: dict[str, Any], message: str
) -> None:
    body = {} if kind is ChatRequest else {"prompt": "Hi"}
    with pytest.raises(HttpError) as error:
        parse(json.dumps(body | fields).encode(), kind, "m")
    assert error.value.message.startswith(message)
    assert (error.value.param or "").split(".")[0] in message


def test_limits_of_floats_are_shown_without_decimals() -> None:
    with pytest.raises(HttpError, match=r"temperature: invalid value 3, expected at most 2$"):
        parse(b'{"prompt": "Hi", "temperature": 3}', CompletionRequest, "m")


def test_an_unknown_field_with_an_unpaired_surrogate_is_named_in_the_response() -> None:
    with pytest.raises(HttpError) as error:
        parse(rb'{"prompt": "Hi", "\ud800": 1}', CompletionRequest, "m")
    assert json.loads(error.value.response().body)["error"]["param"] == "\ud800"


@pytest.mark.parametrize("messages", [[1, 2], [{"role": "user", "content": [1, 2]}]])
def test_a_list_of_invalid_items_is_one_error(messages: list[Any]) -> None:
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate({"model": "m", "messages": messages})
    assert error.value.error_count() == 1


def test_null_and_fields_without_influence_change_nothing() -> None:
    plain = parse(b'{"prompt": "Hi"}', CompletionRequest, "m")
    nulls: dict[str, Any] = {
        name: None for name in CompletionRequest.model_fields if name != "prompt"
    }
    neutral: dict[str, Any] = {
        "user": "x",
        "metadata": {},
        "tools": [],
        "logit_bias": {},
        "audio": None,
    }
    body = json.dumps({"prompt": ["Hi"]} | nulls | neutral).encode()
    assert parse(body, CompletionRequest, "m") == plain
    sent: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}]}
    sent |= {"refusal": None, "tool_calls": [], "name": "x"}
    request = parse(json.dumps({"messages": [sent]}).encode(), ChatRequest, "m")
    assert request.conversation == parse(chat(), ChatRequest, "m").conversation
