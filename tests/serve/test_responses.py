"""/v1/responses as the official client sees it, on a real port."""

import json
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from support.servers import ServerProcess
from tgen.api import Model

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
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text


def test_failed_stream_ends_with_an_error_that_clients_raise() -> None:
    from tgen.serve.http_error import unavailable
    from tgen.serve.responses import read

    _, form = read(b'{"input": "x", "stream": true}', "m")
    name, _, data = form.error(unavailable("gone", "shutting_down")).decode().partition("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert event["code"] == event["error"]["code"] == "shutting_down"
