"""Forms of calls: as the official client sees them, and the texts that they allow."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.chats import CHATML, HERMES_TOOLS, LLAMA_TOOLS, MISTRAL_TOOLS
from support.servers import JSON, ServerProcess, serving
from support.tools import (
    CITY,
    NAMED,
    NOW,
    UNIT,
    USER,
    WEATHER,
    WEATHER_SCHEMA,
    request_of,
    with_template,
)
from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.generation.loop import make_source
from tgen.loaded_model import LoadedModel
from tgen.serve.answer_json import Answer
from tgen.serve.call_reader import CallReader
from tgen.serve.http_error import HttpError, to_http
from tgen.serve.preparation import find_call_form, prepare

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="module")
def tool_model(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the random model with Mistral's syntax of calls."""
    path = tmp_path_factory.mktemp("tools") / "tiny"
    path.mkdir()
    for file in chat_model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"chat_template": MISTRAL_TOOLS}))
    return path


@pytest.fixture(scope="module")
def tooled(tool_model: Path) -> Iterator[ServerProcess]:
    """Return a server of this model."""
    with serving(tool_model, "--batch-size", 16) as server:
        yield server


@pytest.fixture(scope="module")
def client(tooled: ServerProcess) -> "openai.OpenAI":
    return tooled.client()


def check_call(call: Any) -> None:
    """Check a call of the official client's."""
    arguments = json.loads(call.function.arguments)
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "weather"
        assert re.fullmatch(CITY["pattern"], arguments["city"])
        assert arguments["unit"] in UNIT["enum"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_are_valid_whole_and_as_a_stream(
    client: "openai.OpenAI", tooled: ServerProcess, choice: Any
) -> None:
    options: dict[str, Any] = {"model": tooled.model, "messages": USER, "tools": [WEATHER, NOW]}
    options |= {"tool_choice": choice, "seed": 5, "n": 4, "max_tokens": 1000}
    whole = client.chat.completions.create(**options)
    for answer in whole.choices:
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert answer.message.tool_calls
        for call in answer.message.tool_calls:
            check_call(call)
        if choice == NAMED:
            assert [call.function.name for call in answer.message.tool_calls] == ["weather"]
    # A stop string does not cut a call.
    with client.chat.completions.stream(stop=['"', "i"], **options) as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(streamed.choices, whole.choices, strict=True):
        assert one.finish_reason == "tool_calls"
        assert [(c.function.name, c.function.arguments) for c in one.message.tool_calls] == [
            (c.function.name, c.function.arguments) for c in other.message.tool_calls
        ]


def test_forced_calls_are_items_of_a_response(
    client: "openai.OpenAI", tooled: ServerProcess
) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER_SCHEMA}
    options: dict[str, Any] = {"model": tooled.model, "input": USER[0]["content"], "tools": [tool]}
    options |= {"tool_choice": {"type": "function", "name": "weather"}, "extra_body": {"seed": 5}}
    chat = client.chat.completions.create(
        model=tooled.model, messages=USER, tools=[WEATHER], tool_choice=NAMED, seed=5
    )
    [expected] = chat.choices[0].message.tool_calls
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        [item] = response.output
        assert (item.type, item.status) == ("function_call", "completed")
        assert (item.name, item.arguments) == ("weather", expected.function.arguments)
    output = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "Sun."}
    conversation: Any = [*USER, whole.output[0].to_dict(), output]
    options |= {"tool_choice": "none", "max_output_tokens": 5}
    short = client.responses.create(**options).usage.input_tokens
    second = client.responses.create(**options | {"input": conversation})
    assert second.output_text
    assert second.usage.input_tokens > short


def test_template_and_capabilities_show_tools(tooled: ServerProcess) -> None:
    body = {"messages": USER, "tools": [WEATHER]}
    prompt = tooled.post("/apply-template", body).json()["prompt"]
    assert '"name": "weather"' in prompt
    assert prompt.endswith(f"{USER[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    shown = tooled.post("/api/show", {"model": tooled.model}).json()
    assert shown["capabilities"] == ["completion", "tools"]


def test_calls_end_within_the_limit_and_have_no_other_arguments(tooled: ServerProcess) -> None:
    parameters = {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
    tool = {"name": "say", "parameters": parameters | {"required": ["text"]}}
    body = {"messages": USER, "tools": [{"type": "function", "function": tool}], "n": 8, "seed": 1}
    body |= {"tool_choice": "required", "max_tokens": 60}
    answer = tooled.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"]).keys() <= {"text", "n"}


def test_one_call_without_parallel_calls(client: "openai.OpenAI", tooled: ServerProcess) -> None:
    answer = client.chat.completions.create(
        model=tooled.model,
        messages=USER,
        tools=[WEATHER, NOW],
        tool_choice="required",
        parallel_tool_calls=False,
        n=8,
        seed=1,
    )
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1] * 8


def test_model_calls_by_itself_after_any_text(
    client: "openai.OpenAI", tooled: ServerProcess
) -> None:
    options: dict[str, Any] = {"model": tooled.model, "messages": USER, "tools": [WEATHER, NOW]}
    options |= {"n": 32, "seed": 2, "max_tokens": 150, "temperature": 2}
    contents, finishes = [""] * 32, [None] * 32
    arguments: list[dict[int, str]] = [{} for _ in range(32)]
    for chunk in client.chat.completions.create(stream=True, extra_body={"top_k": 0}, **options):
        for part in chunk.choices:
            assert finishes[part.index] is None
            contents[part.index] += part.delta.content or ""
            finishes[part.index] = part.finish_reason
            for call in part.delta.tool_calls or []:
                assert (call.id is None) == (call.index in arguments[part.index])
                before = arguments[part.index].get(call.index, "")
                arguments[part.index][call.index] = before + call.function.arguments
    calling = [i for i in range(32) if finishes[i] == "tool_calls"]
    assert calling
    for i in calling:
        for text in arguments[i].values():
            assert set(json.loads(text)) in ({"city", "unit"}, set())
    assert any(contents[i].strip() for i in calling)
    stopped = client.chat.completions.create(stop="e", extra_body={"top_k": 0}, **options)
    texts = [answer.message.content or "" for answer in stopped.choices]
    assert texts == [text.partition("e")[0] for text in contents]


def test_a_schema_that_is_nested_deeply_is_an_error(served: ServerProcess) -> None:
    n = 300
    schema = '{"type": "object", "properties": {"x": ' * n + "{}" + "}}" * n
    body = json.dumps({"messages": USER, "tools": [NOW], "tool_choice": "required"})
    body = body.replace('"description"', f'"parameters": {schema}, "description"')
    answer = served.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert "nest" in answer.json()["error"]["message"]


def test_results_go_back_to_the_model(client: "openai.OpenAI", tooled: ServerProcess) -> None:
    options: dict[str, Any] = {"model": tooled.model, "tools": [WEATHER], "max_tokens": 400}
    first = client.chat.completions.create(messages=USER, tool_choice=NAMED, **options)
    message = first.choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    messages = [*USER, message.to_dict(), result]
    second = client.chat.completions.create(messages=messages, tool_choice="none", **options)
    assert second.choices[0].message.tool_calls is None
    short = client.chat.completions.create(messages=USER, tool_choice="none", **options)
    assert second.usage.prompt_tokens > short.usage.prompt_tokens
    text = tooled.post("/v1/chat/completions", {"messages": [*USER, message.to_dict(), result]})
    assert text.status_code == 200


def test_response_format_is_of_texts_without_calls(tooled: ServerProcess) -> None:
    schema = {"enum": ["yes", "no"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": USER, "tools": [WEATHER], "response_format": form, "n": 8, "seed": 3}
    answer = tooled.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] in ("stop", "tool_calls")
        assert choice["message"]["content"] in ('"yes"', '"no"', None)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER], "require": "x"}, "require"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [NOW["function"]]}, "functions"),
    (
        {
            "tools": [
                NOW,
                {
                    "type": "function",
                    "function": {
                        "name": "x",
                        "parameters": {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
                    },
                },
            ]
        },
        "tools[1].function.parameters",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}], "tools": [NOW]}, "messages"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), ERRORS, ids=lambda value: str(value)[:40])
def test_errors_name_the_field(tooled: ServerProcess, fields: dict[str, Any], param: str) -> None:
    answer = tooled.post("/v1/chat/completions", {"messages": USER, "max_tokens": 3} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"].split("[0]")[0] == param
    assert error["message"].startswith(param)


def test_model_without_a_syntax_calls_by_schema_only(loaded: LoadedModel) -> None:
    with pytest.raises(HttpError, match='use "required" or a function') as error:
        find_call_form(loaded, request_of())
    assert error.value.param == "tool_choice"
    kind = {"$defs": {"k": {"enum": ["a", "b"]}}, "properties": {"k": {"$ref": "#/$defs/k"}}}
    named = {
        "name": "kind",
        "parameters": kind | {"required": ["k"], "additionalProperties": False},
    }
    tools = [NOW, {"type": "function", "function": named}]
    request = request_of(tools=tools, tool_choice="required", max_tokens=200, n=8, seed=1)
    prepared = prepare(loaded, request, 200, calls=find_call_form(loaded, request))
    answer = Answer(request, prepared, "m", "f", loaded.vocabulary.bytes_of)
    for token in loaded.complete(make_source(prepared.requests), batch_size=8):
        answer.add([(token.sequence, token)])
    seen = set()
    for choice in answer.whole()["choices"]:
        [call] = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        seen.add(call["function"]["name"])
        if call["function"]["name"] == "now":
            assert arguments == {}
        else:
            assert arguments["k"] in ("a", "b")
    assert seen == {"now", "kind"}


@pytest.mark.parametrize(
    ("address", "ref"),
    [
        (None, "#/$defs/k"),
        (5, "#/$defs/k"),
        ("x", "#/$defs/k"),
        ("x#y", "x#/$defs/k"),
        ("http://[", "#/$defs/k"),
        ("https://e.x/a", "#/$defs/k"),
        ("https://e.x/{}", "https://e.x/{}#/$defs/k"),
    ],
)
def test_references_of_a_tool_stay_within_its_schema(
    loaded: LoadedModel, address: Any, ref: str
) -> None:
    tools = []
    for name, allowed in (("first", "a"), ("second", "b")):
        own = address.format(name) if isinstance(address, str) else address
        parameters = {"$id": own, "$defs": {"k": {"enum": [allowed]}}, "required": ["k"]}
        parameters["properties"] = {"k": {"$ref": ref.format(name)}}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    form = find_call_form(loaded, request_of(tools=tools, tool_choice="required"))
    size = loaded.tokenizer.vocab_size
    for tool, value in product(("first", "second"), "ab"):
        matcher = loaded.vocabulary.grammars.matcher(SamplingConfig(**form.constraint))
        assert matcher
        text = json.dumps({"name": tool, "arguments": {"k": value}})
        for i in loaded.vocabulary.encode(text.encode()):
            if not matcher.allowed(size)[i]:
                break
            matcher.accept(i)
        assert matcher.complete == ((tool, value) in (("first", "a"), ("second", "b")))


def test_byte_that_no_text_has_is_no_start_of_a_control_token(loaded: LoadedModel) -> None:
    form = find_call_form(with_template(loaded, MISTRAL_TOOLS), request_of())
    matcher = loaded.vocabulary.grammars.matcher(SamplingConfig(**form.constraint))
    assert matcher
    allowed = matcher.allowed(loaded.tokenizer.vocab_size)
    assert allowed[loaded.tokenizer.added_tokens["<|tool|>"]]
    assert not allowed[loaded.vocabulary.tokens.index(b"\xff")]


def test_opener_may_have_several_control_tokens(loaded: LoadedModel) -> None:
    source = MISTRAL_TOOLS.replace("<|tool|> [", "[INST]<|tool|> [")
    form = find_call_form(with_template(loaded, source), request_of())
    matcher = loaded.vocabulary.grammars.matcher(SamplingConfig(**form.constraint))
    assert matcher
    added, encode = loaded.tokenizer.added_tokens, loaded.vocabulary.encode
    start, _, rest = form.syntax.write([("now", {})]).partition("<|tool|>")
    ids = [*encode(b"Wait. "), added[start], added["<|tool|>"], *encode(rest.encode())]
    reader, content = CallReader(form), ""
    for i in ids:
        assert matcher.allowed(loaded.tokenizer.vocab_size)[i]
        matcher.accept(i)
        content += reader.feed(i, loaded.vocabulary.bytes_of(i).decode(), last=False)
    assert matcher.complete
    assert content == "Wait."
    assert [call["function"]["name"] for call in reader.calls] == ["now"]


def test_text_before_the_control_token_of_a_call_is_no_known_syntax(loaded: LoadedModel) -> None:
    model = with_template(loaded, MISTRAL_TOOLS.replace("<|tool|> [", "Calls: <|tool|> ["))
    with pytest.raises(HttpError, match="no known syntax of tool calls"):
        find_call_form(model, request_of())
    assert find_call_form(model, request_of(tool_choice="required")).syntax.opener


def test_errors_name_the_tool_by_its_position_in_the_request(loaded: LoadedModel) -> None:
    form = find_call_form(
        with_template(loaded, HERMES_TOOLS), request_of(tools=[NOW, WEATHER], tool_choice=NAMED)
    )
    error = form.name_tool(UsageError("grammar: line 1: wrong", field="grammar"))
    assert error.message == "tools[1].function.parameters: wrong"
    for name in ("x", "tool7", "tool" + "9" * 5000):  # of the tool's own schema
        text = f"$defs.{name}.format: wrong"
        assert form.name_place(text) == ("tools[1].function.parameters", text)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("template", [HERMES_TOOLS, CHATML])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "properties.a: uniqueItems is not supported"),
        ({"pattern": "(?=a)"}, "properties.a.pattern: look-around"),
        ({"type": "string", "format": "phone"}, 'properties.a.format: "phone" is not checked'),
    ],
)
def test_errors_and_notes_name_the_tool_and_the_place_in_its_schema(
    loaded: LoadedModel, choice: Any, template: str, schema: dict[str, Any], reason: str
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    named = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    request = request_of(tools=[NOW, named], tool_choice=choice)
    model = with_template(loaded, template)
    form = find_call_form(model, request)
    try:
        [text] = prepare(model, request, 9, calls=form).notes
    except UsageError as error:
        text = form.name_tool(error).message
    assert text.startswith(f"tools[1].function.parameters: {reason}")


def test_syntax_without_a_marker_refuses_a_response_format(loaded: LoadedModel) -> None:
    model = with_template(loaded, LLAMA_TOOLS)
    form = {"type": "json_object"}
    for fields in (
        {"response_format": form},
        {"guided_json": {}},
        {"json_schema": "{}"},
        {"structured_outputs": {"json_object": True}},
    ):
        refused = request_of(**fields)
        [field] = fields
        with pytest.raises(HttpError) as error:
            find_call_form(model, refused)
        named = to_http(error.value, refused.names)
        assert (named.param, named.message) == (
            field,
            f"{field} cannot be combined with the tools of this model",
        )
    request = request_of(response_format=form, tool_choice="required", max_tokens=1)
    calls = find_call_form(model, request)
    [text] = prepare(model, request, 1, calls=calls).requests
    assert text.sampling.json_schema is None
    assert text.sampling.grammar == calls.constraint["grammar"]


def test_last_message_of_the_assistant_is_continued(tooled: ServerProcess) -> None:
    said = {"role": "assistant", "content": "It is ", "refusal": None, "annotations": [], "id": 7}
    body = {"messages": [*USER, said], "max_tokens": 3, "seed": 1}

    def count(**fields: Any) -> int:
        answer = tooled.post("/v1/chat/completions", body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    continued = count()
    assert count(continue_final_message=True, add_generation_prompt=False) == continued
    ended = count(continue_final_message=False, add_generation_prompt=False)
    assert continued < ended < count(add_generation_prompt=True)
