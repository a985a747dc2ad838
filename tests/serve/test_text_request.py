"""Fields of a request: what is accepted, and errors that name field and value."""

import dataclasses
import json
from typing import Any

import pytest
from pydantic import ValidationError

from tgen.config import CONSTRAINTS, SamplingConfig
from tgen.serve.http_error import HttpError
from tgen.serve.text_request import ChatRequest, CompletionRequest, TextRequest, parse


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | fields).encode()


_NEWER = "unknown field 'max_completion_token': did you mean max_completion_tokens?"
MESSAGES: list[tuple[type[TextRequest], dict[str, Any], str]] = [
    (CompletionRequest, {"n": 0}, "n: invalid value 0, expected at least 1"),
    (CompletionRequest, {"top_k": 2**31}, "top_k: invalid value 2147483648, expected at most 2,14"),
    (CompletionRequest, {"seed": 1.5}, "seed: invalid value 1.5, expected a whole number"),
    (CompletionRequest, {"n": 0.0}, "n: invalid value 0.0, expected at least 1"),
    (CompletionRequest, {"min_p": "0"}, 'min_p: invalid value "0", expected a number'),
    (CompletionRequest, {"min_p": 10**400}, "min_p: invalid value 1000"),
    (CompletionRequest, {"echo": 1}, "echo: invalid value 1, expected true or false"),
    (CompletionRequest, {"stop": [""]}, 'stop: invalid value [""], expected up to 64 strings of'),
    (CompletionRequest, {"prompt": [[1], 2]}, "prompt: invalid value [[1], 2], expected a string"),
    (CompletionRequest, {"prompt": None}, "prompt is missing"),
    (CompletionRequest, {"tempature": 1}, "unknown field 'tempature': did you mean temperature?"),
    (CompletionRequest, {"messages": []}, "unknown field 'messages'"),
    (CompletionRequest, {"min_token": 1}, "unknown field 'min_token': did you mean min_tokens?"),
    (CompletionRequest, {"mirostat": 2}, "mirostat is not supported"),
    (CompletionRequest, {"penalize_newline": False}, "penalize_newline is not supported"),
    (CompletionRequest, {"repeat_last_n": 0}, "repeat_last_n: invalid value 0, expected -1 or at"),
    (CompletionRequest, {"bias": {"": 1}}, 'bias: invalid value {"": 1}, expected up to 64'),
    (CompletionRequest, {"bias": [1]}, "bias: invalid value [1], expected a number per string"),
    (CompletionRequest, {"guided_choice": [1]}, "guided_choice: invalid value [1], expected a lis"),
    (CompletionRequest, {"guided_choice": ["é" * 33_000]}, 'guided_choice: invalid value ["'),
    (CompletionRequest, {"json_schema": 5}, "json_schema: invalid value 5, expected a JSON schema"),
    (CompletionRequest, {"structured_outputs": {"x": 1}}, "structured_outputs.x is not supported"),
    (CompletionRequest, {"regex": "a" * 66000}, 'regex: invalid value "aaa'),
    (CompletionRequest, {"n_predict": -5}, "n_predict: invalid value -5"),
    (CompletionRequest, {"n_predict": 1, "max_tokens": 2}, "n_predict cannot be combined with max"),
    (
        CompletionRequest,
        {"regex": "a", "guided_json": {}},
        "regex: there is a constraint already (got guided_json)",
    ),
    (
        CompletionRequest,
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs: there is a constraint already (got structured_outputs)",
    ),
    (
        CompletionRequest,
        {"guided_grammar": "a", "structured_outputs": {"grammar": "b"}},
        "guided_grammar: there is a constraint already (got structured_outputs)",
    ),
    (CompletionRequest, {"structured_outputs": {}}, "structured_outputs: no constraint, expected"),
    (
        CompletionRequest,
        {"structured_outputs": {"regex": None, "json_object": False}, "regex": "a"},
        "structured_outputs: no constraint, expected json, json_object, regex, choice or grammar",
    ),
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
    (ChatRequest, {"max_completion_token": 5}, _NEWER),
    (ChatRequest, {"messages": {}}, "messages: invalid value {}, expected a list"),
    (ChatRequest, {"messages": []}, "messages: invalid value [], expected a value that is not em"),
    (
        ChatRequest,
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
        'tools: invalid value [{"type": "function", "function": {"name": "f0"}}, {"type": , '
        "expected at most 128 items",
    ),
    (
        ChatRequest,
        {"messages": [{"role": "", "content": "Hi"}]},
        'messages[0].role: invalid value "", expected a value that is not empty',
    ),
    (
        ChatRequest,
        {"response_format": {"type": "json_object", "schema": {"enum": ["\ud800"]}}},
        'response_format.schema: invalid value {"enum": ["\\ud800"]}, expected text without',
    ),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": []}]},
        "messages[0].content: invalid value [], expected a value that is not empty",
    ),
    (
        ChatRequest,
        {"messages": [{"role": "assistant", "content": {}, "tool_calls": [{}]}]},
        "messages[0].content: invalid value {}, expected a string or a list of text parts",
    ),
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
        "messages[0].tool_calls[0]: invalid value 1, expected an object",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "message"), MESSAGES, ids=lambda value: str(value)[:40])
def test_errors_say_which_field_has_which_value_and_what_is_expected(
    kind: type[TextRequest], fields: dict[str, Any], message: str
) -> None:
    body: Any = json.loads(chat()) if kind is ChatRequest else {"prompt": "Hi"}
    with pytest.raises(HttpError) as error:
        parse(json.dumps(body | fields).encode(), kind, "m")
    assert error.value.message.startswith(message)
    assert (error.value.param or "").split(".")[0] in message


def test_limits_of_floats_are_shown_without_decimals() -> None:
    with pytest.raises(HttpError, match=r"temperature: invalid value 3, expected at most 2$"):
        parse(b'{"prompt": "Hi", "temperature": 3}', CompletionRequest, "m")


@pytest.mark.parametrize("name", ["ban_eos_token", "max_completion_tokens", "options"])
def test_no_other_word_is_suggested(name: str) -> None:
    with pytest.raises(HttpError, match=rf"unknown field '{name}'$"):
        parse(json.dumps({"prompt": "Hi", name: 1}).encode(), CompletionRequest, "m")


def test_no_field_without_an_effect_is_suggested() -> None:
    with pytest.raises(HttpError, match=r"unknown field 'prompt'$"):
        parse(chat(prompt="Hi"), ChatRequest, "m")


def test_byte_order_mark_before_a_body_is_ignored() -> None:
    request = parse(b"\xef\xbb\xbf" + b'{"prompt": "Hi"}', CompletionRequest, "m")
    assert request.prompt == ["Hi"]


def test_an_error_in_json_does_not_tell_how_to_configure_python() -> None:
    with pytest.raises(HttpError) as error:
        parse(b'{"seed": ' + b"9" * 5000 + b"}", CompletionRequest, "m")
    assert error.value.message.endswith("value has 5000 digits")


def test_an_unknown_field_with_an_unpaired_surrogate_is_named_in_the_response() -> None:
    with pytest.raises(HttpError) as error:
        parse(rb'{"prompt": "Hi", "\ud800": 1}', CompletionRequest, "m")
    assert json.loads(error.value.response("").body)["error"]["param"] == "\ud800"


@pytest.mark.parametrize(
    "messages",
    [
        [1, 2],
        [{"role": "user", "content": [1, 2]}],
        [{"role": "assistant", "content": "x", "tool_calls": [1, 2]}],
    ],
)
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
        "length_penalty": 1.0,
        "chat_template_kwargs": {},
    }
    body = json.dumps({"prompt": ["Hi"]} | nulls | neutral).encode()
    assert parse(body, CompletionRequest, "m") == plain
    sent: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}]}
    sent |= {"refusal": None, "tool_calls": [], "name": "x"}
    request = parse(json.dumps({"messages": [sent]}).encode(), ChatRequest, "m")
    assert request.conversation == parse(chat(), ChatRequest, "m").conversation


WHOLE = ("max_tokens", "n", "top_k", "seed", "min_tokens", "penalty_window", "no_repeat_ngram")


@pytest.mark.parametrize("name", [*WHOLE, "dry_allowed_length", "logprobs", "best_of"])
def test_whole_numbers_may_have_a_decimal_point(name: str) -> None:
    body = json.dumps({"prompt": "x", name: 3.0}).encode()
    value = getattr(parse(body, CompletionRequest, "m"), name)
    assert (type(value), value) == (int, 3)


def test_what_an_assistant_refused_with_is_its_text() -> None:
    part = {"type": "refusal", "refusal": "No."}
    sent = {"messages": [{"role": "assistant", "content": [part]}], "prompt_cache_options": {}}
    [message] = parse(json.dumps(sent).encode(), ChatRequest, "m").conversation
    assert message == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_answers_and_results_may_be_empty(role: str, content: dict[str, Any]) -> None:
    sent = {"messages": [{"role": role} | content, {"role": "user", "content": "Hi"}]}
    request = parse(json.dumps(sent).encode(), ChatRequest, "m")
    assert request.conversation[0] == {"role": role, "content": ""}


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_p": 0, "top_k": -1, "top_n_sigma": -1}, {"top_p": 5e-324, "top_k": 0, "top_n_sigma": 0}),
    (
        {"repeat_penalty": 1.5, "repeat_last_n": 64, "dry_sequence_breakers": ["x"]},
        {"repetition_penalty": 1.5, "penalty_window": 64, "dry_breakers": ["x"]},
    ),
    (
        {"bad_words": ["x"], "repeat_last_n": -1, "mirostat": 0, "id_slot": 1},
        {"ban": ["x"], "penalty_window": 0},
    ),
    ({"penalize_newline": True, "tfs_z": 1.0, "mirostat_tau": 5.0, "dynatemp_exponent": 1}, {}),
    ({"logit_bias": {"5": -100}, "seed": -1}, {"logit_bias": {"5": -100}}),
    ({"guided_json": {}, "grammar": "", "response_format": {"type": "text"}}, {"json_schema": {}}),
    ({"guided_json": '{"type": "null"}'}, {"json_schema": '{"type": "null"}'}),
    ({"json_schema": False}, {"json_schema": False}),
    ({"guided_regex": "a"}, {"regex": "a"}),
    ({"guided_choice": ["a"]}, {"choices": ["a"]}),
    ({"guided_choice": ["é" * 30_000]}, {"choices": ["é" * 30_000]}),
    ({"guided_grammar": "root ::= a"}, {"grammar": "root ::= a"}),
    ({"structured_outputs": {"json": {}, "regex": None}}, {"json_schema": {}}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
    ({"structured_outputs": {"choice": ["a"], "json_object": False}}, {"choices": ["a"]}),
    ({"structured_outputs": {"grammar": "root ::= a"}}, {"grammar": "root ::= a"}),
]


@pytest.mark.parametrize(("fields", "expected"), SAMPLING, ids=lambda value: str(value)[:40])
def test_names_of_other_servers_are_those_of_sampling_config(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = parse(json.dumps({"prompt": "Hi"} | fields).encode(), CompletionRequest, "m")
    assert request.sampling == expected
    for option in expected.keys() & CONSTRAINTS:
        assert request.names[option] == request.constraint in fields


def test_every_sampling_option_is_a_field() -> None:
    others = {"max_new_tokens", "explain", "overflow", "penalize_prompt"}
    for kind in (CompletionRequest, ChatRequest):
        assert {field.name for field in dataclasses.fields(SamplingConfig)} - others <= {
            *kind.model_fields
        }
