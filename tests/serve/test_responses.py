"""/v1/responses as the official client sees it, on a real port."""

import json
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from support.servers import ServerProcess
from tgen.python_api import Model
from tgen.serve.engine_thread import Job
from tgen.serve.http_error import HttpError, unavailable
from tgen.serve.responses import read

if TYPE_CHECKING:
    import openai

TEXT = "What is <|im_end|> a king?"


@pytest.fixture(scope="module")
def client(served: ServerProcess) -> "openai.OpenAI":
    return served.client()


def test_response_is_the_answer_of_the_chat(client: "openai.OpenAI", alone: Model) -> None:
    expected = alone.chat([{"role": "user", "content": TEXT}], seed=3, max_new_tokens=30)
    options: dict[str, Any] = {"max_output_tokens": 30, "extra_body": {"seed": 3}}
    response = client.responses.create(input=TEXT, metadata={"a": "b"}, **options)
    assert response.output_text == expected
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"a": "b"}
    assert (response.store, response.previous_response_id) == (False, None)
    assert response.usage
    assert response.usage.output_tokens == 30
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": response.output_text},
        {"role": "user", "content": "Why?"},
    ]
    expected = alone.chat(messages, seed=3, max_new_tokens=30)
    parts = [{"type": "input_text", "text": "W"}, {"type": "input_text", "text": "hy?"}]
    conversation: Any = [
        {"role": "user", "content": "Hi"},
        *(item.to_dict() for item in response.output),
        {"type": "message", "role": "user", "content": parts},
    ]
    answer = client.responses.create(instructions="Be short.", input=conversation, **options)
    assert answer.output_text == expected


def test_stream_has_openais_events_and_ends_with_the_whole_response(
    client: "openai.OpenAI",
) -> None:
    options: dict[str, Any] = {"input": TEXT, "max_output_tokens": 30, "extra_body": {"seed": 3}}
    whole = client.responses.create(**options)
    events = [*client.responses.create(stream=True, **options)]
    types = [event.type for event in events]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert {*types[4:-4]} == {"response.output_text.delta"}
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last: Any = events[-1]
    names = {"id", "created_at", "output"}
    assert last.response.to_dict().keys() == whole.to_dict().keys()
    assert last.response.model_dump(exclude=names) == whole.model_dump(exclude=names)


def test_structured_output_and_logprobs(client: "openai.OpenAI", served: ServerProcess) -> None:
    class Digit(pydantic.BaseModel):
        digit: int = pydantic.Field(ge=0, le=9)

    parsed = client.responses.parse(
        input=TEXT,
        text_format=Digit,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=200,
        extra_body={"seed": 1},
    )
    assert parsed.output_parsed
    assert parsed.status == "completed"
    content: Any = parsed.output[0]
    logprobs = content.content[0].logprobs
    assert "".join(one.token for one in logprobs) == parsed.output_text
    assert len(logprobs[0].top_logprobs) == 2
    options: dict[str, Any] = {"text_format": Digit, "extra_body": {"seed": 1}}
    with client.responses.stream(model=served.model, input=TEXT, **options) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    form = {"format": {"type": "json_object"}}
    body = {"input": TEXT, "text": form, "max_output_tokens": 2}
    assert served.post("/v1/responses", body).json()["output"][0]["content"][0]["text"][0] in "{ \n"


@pytest.mark.parametrize("field", ["tools", "include"])
def test_a_list_of_invalid_items_is_one_error(field: str) -> None:
    with pytest.raises(HttpError) as error:
        read(json.dumps({"input": TEXT, field: [1, 2]}).encode(), "m")
    assert isinstance(error.value.__context__, pydantic.ValidationError)
    assert error.value.__context__.error_count() == 1


def test_a_response_names_the_form_of_its_text() -> None:
    for form in ({}, {"text": {}}, {"text": {"format": {"type": "text"}}}):
        _, answer = read(json.dumps({"input": TEXT} | form).encode(), "m")
        assert answer._settings["text"] == {"format": {"type": "text"}}


SCHEMA_FORMAT = {"type": "json_schema", "name": "x"}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("previous_response_id", "resp_1", "stores nothing"),
        ("conversation", "conv_1", "stores nothing"),
        ("store", True, "stores nothing"),
        ("background", True, "stores nothing"),
        ("input", [], "a string or a list of items"),
        ("input", [{"type": "item_reference", "id": "msg_1"}], "store: false"),
        ("input", [{"type": "computer_call"}], "'computer_call' is not supported"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input_text"),
        ("input", [{"role": "user", "content": 5}], "input[0].content: invalid value 5"),
        ("tools", [{"type": "web_search"}], "only function"),
        ("max_output_tokens", 0, "max_output_tokens: invalid value 0"),
        ("truncation", "auto", "truncation"),
        ("top_logprobs", 2, "include"),
        ("response_format", {"type": "text"}, "text.format"),
        ("n", 2, "n is not supported"),
        ("seed", -5, "seed"),
        ("include", ["reasoning.encrypted_content", "x"], 'include[1]: invalid value "x"'),
        ("text", {"format": SCHEMA_FORMAT | {"schema": {"type": "x"}}}, "text.format: type: "),
        ("text", {"format": SCHEMA_FORMAT}, "text.format.schema is missing"),
        ("text", {"format": {"type": "text", "schema": {}}}, "beside the type text"),
        ("tools", [{"type": "function", "name": "a b"}], "tools[0].name: invalid value"),
        ("input", "word " * 3000, "the conversation has"),
        (
            "input",
            [{"role": "user", "content": "x"}, {"role": "", "content": "x"}],
            "input[1].role",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    served: ServerProcess, field: str, value: object, words: str
) -> None:
    answer = served.post("/v1/responses", {"input": "x", field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith(field)


def test_what_asks_for_nothing_is_accepted(served: ServerProcess) -> None:
    body = {"input": "x", "store": False, "background": False, "max_output_tokens": 1}
    body |= {"previous_response_id": None, "reasoning": {"effort": "low"}, "user": "me"}
    body |= {"include": ["reasoning.encrypted_content"], "truncation": "disabled", "tools": []}
    body |= {"client_metadata": {"x-codex-installation-id": "1"}}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text


def parse(events: bytes) -> list[dict[str, Any]]:
    """Return the data of server-sent events, each of which has the name of its type."""
    result = []
    for event in events.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        result.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + result[-1]["type"]
    return result


def chunk(
    delta: dict[str, Any], finish: str | None = None, *tokens: dict[str, Any]
) -> dict[str, Any]:
    """Return a chunk of a chat with the log-probabilities of tokens."""
    logprobs = {"content": [*tokens]} if tokens else None
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice]}


def call(index: int, arguments: str, **first: str) -> dict[str, Any]:
    """Return a delta with a part of a call, whose first part has `id` and `name`."""
    name = {"name": first.pop("name")} if first else {}
    return {"tool_calls": [{"index": index, **first, "function": {**name, "arguments": arguments}}]}


def test_calls_are_items_of_their_own() -> None:
    _, form = read(b'{"input": "x", "stream": true}', "m")
    deltas = [{"role": "assistant", "content": ""}, {"content": "So"}, {"content": "."}]
    deltas += [call(0, "", id="a", name="f"), call(0, '{"x":'), call(0, "1}")]
    deltas += [call(1, "{}", id="b", name="g")]
    job = Job([], stream=True)
    stream = form.chunks([*map(chunk, deltas), chunk({}, "tool_calls")]) + form.end(job)
    *events, last = parse(stream)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in added] == ["message", "function_call", "function_call"]
    assert [item.get("arguments", "") for item in added] == ["", "", ""]
    assert [item.get("content") for item in added] == [[], None, None]
    assert {item["status"] for item in done} == {"completed"}
    assert done == last["response"]["output"]
    text, *calls = done
    assert text["content"][0]["text"] == "So."
    assert [(item["call_id"], item["name"], item["arguments"]) for item in calls] == [
        ("a", "f", '{"x":1}'),
        ("b", "g", "{}"),
    ]
    assert len({item["id"] for item in done}) == 3
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    assert last["type"] == "response.completed"
    _, form = read(b'{"input": "x"}', "m")
    functions = [
        ("a", {"name": "f", "arguments": '{"x":1}'}),
        ("b", {"name": "g", "arguments": "{}"}),
    ]
    message = {"content": "So.", "tool_calls": [{"id": i, "function": f} for i, f in functions]}
    answer = chunk(message, "tool_calls")
    answer["choices"][0]["message"] = answer["choices"][0].pop("delta")
    output = form.whole(answer, job)["output"]
    assert [item | {"id": ""} for item in output] == [item | {"id": ""} for item in done]


def test_calls_and_their_outputs_are_messages_of_the_chat() -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    body = {
        "input": [
            {"role": "user", "content": "Rome?"},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {"type": "function_call_output", "call_id": "b", "output": "rainy"},
        ],
        "tools": [{"type": "function", "strict": True, **function}],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
    }
    request, _ = read(json.dumps(body).encode(), "m")
    calls = [{"id": "a", "arguments": {"x": 1}}, {"id": "b", "arguments": {}}]
    user, assistant, *results = request.conversation
    assert user == {"role": "user", "content": "Rome?"}
    assert [
        {"id": call["id"], "arguments": call["function"]["arguments"]}
        for call in assistant["tool_calls"]
    ] == calls
    assert [(one["tool_call_id"], one["content"]) for one in results] == [
        ("a", "sunny"),
        ("b", "rainy"),
    ]
    assert [tool.for_template["function"] for tool in request.tools] == [function]
    assert (request.tool_choice.name, request.parallel_tool_calls) == ("weather", False)


def test_tokens_of_an_unfinished_character_come_with_its_text() -> None:
    _, form = read(b'{"input": "x", "stream": true}', "m")
    tokens: Any = [{"token": name, "logprob": -1.0} for name in "abcd"]
    chunks = [chunk({"content": ""}, None, tokens[0]), chunk({"content": "é"}, None, tokens[1])]
    chunks += [chunk({"content": ""}, None, tokens[2]), chunk(call(0, "{}", id="a", name="f"))]
    chunks += [chunk({"tool_calls": []}, "tool_calls", tokens[3])]
    events = parse(form.chunks(chunks) + form.end(Job([], stream=True)))
    (delta,) = (event for event in events if event["type"] == "response.output_text.delta")
    assert (delta["delta"], delta["logprobs"]) == ("é", tokens[:2])
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == tokens[:2]


@pytest.mark.parametrize("value", [r'"\ud800"', "1e999"])
def test_what_the_answer_cannot_repeat_is_refused(value: str) -> None:
    tool = f'{{"type": "function", "name": "f", "x": {value}}}'
    named = '"tools": [{"type": "function", "name": "f"}], "tool_choice"'
    form = '{"format": {"type": "json_schema", "schema": {}, "name": %s}}'
    for field in (f'"metadata": {{"a": {value}}}', f'"tools": [{tool}]', f"{named}: {tool}"):
        with pytest.raises(HttpError, match=r"surrogates|finite"):
            read(f'{{"input": "x", {field}}}'.encode(), "m")
    with pytest.raises(HttpError, match="text: expected"):
        read(f'{{"input": "x", "text": {form % value}}}'.encode(), "m")


def test_what_is_nested_deeply_is_refused_or_repeated() -> None:
    refused = 0
    for depth in (300, *range(800, 1000)):
        nested = '{"x":' * depth + "1" + "}" * depth
        schema = f'{{"format": {{"type": "json_schema", "name": "x", "schema": {nested}}}}}'
        try:
            _, form = read(f'{{"input": "x", "text": {schema}}}'.encode(), "m")
        except RecursionError:
            refused += 1
        else:
            assert nested.encode() in form.chunks([chunk({"content": "a"}, "stop")])
    assert 0 < refused < 200


def test_failed_stream_ends_with_an_error_that_clients_raise() -> None:
    _, form = read(b'{"input": "x", "stream": true}', "m")
    (event,) = parse(form.error(unavailable("gone", "shutting_down")))
    assert event["type"] == "error"
    assert event["code"] == event["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tool_choice": {"type": "function", "name": 5}},
            'tool_choice: invalid value {"type": "function", "name": 5}, expected none, auto, '
            'required, or a function such as {"type": "function", "name": ...}',
        ),
        (
            {"text": {"format": {"type": "json_object", "schema": {}}}},
            'text.format: invalid value {"type": "json_object", "schema": {}}, expected no other '
            "field beside the type json_object",
        ),
    ],
)
def test_errors_show_the_value_that_was_sent(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HttpError) as error:
        read(json.dumps({"input": "x"} | fields).encode(), "m")
    assert error.value.message == message


def test_a_format_may_have_fields_that_are_null() -> None:
    form = {"type": "json_object", "name": None, "strict": None}
    request, _ = read(json.dumps({"input": "x", "text": {"format": form}}).encode(), "m")
    assert request.sampling == {"json_schema": {"type": "object"}}
