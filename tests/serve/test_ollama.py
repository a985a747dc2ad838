"""Ollama's API over HTTP, on a real port."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from support.servers import JSON, ServerProcess
from support.tools import NAMED, WEATHER
from tgen.config import EngineOptions
from tgen.loaded_model import LoadedModel, open_model
from tgen.python_api import Model
from tgen.serve.engine_thread import Job
from tgen.serve.http_error import HttpError
from tgen.serve.llama_cpp import apply_template
from tgen.serve.ollama import read_chat, read_generate, show
from tgen.serve.preparation import prepare
from tgen.serve.text_request import ChatRequest

USER = [{"role": "user", "content": "What is <|im_end|> a king?"}]
OPTIONS = {
    "embedding_only": False,
    "rope_frequency_base": 1e4,
    "seed": 3,
    "num_predict": 30,
    "temperature": 0.7,
    "repeat_penalty": 1.2,
    "num_ctx": 64,
}


@pytest.fixture(scope="module")
def expected(alone: Model) -> str:
    """Return the answer to USER with OPTIONS."""
    options: dict[str, Any] = {"temperature": 0.7, "repetition_penalty": 1.2, "max_new_tokens": 30}
    return str(alone.chat(USER, seed=3, penalize_prompt=False, **options))


def lines(served: ServerProcess, path: str, body: Any) -> list[dict[str, Any]]:
    """Return the lines of a stream."""
    answer = served.post(path, {"model": f"{served.model}:latest"} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def check_summary(last: dict[str, Any]) -> None:
    assert (last["done"], last["done_reason"]) == (True, "length")
    assert last["eval_count"] == 30
    assert last["prompt_eval_count"] > 10
    durations = [last[f"{name}_duration"] for name in ("prompt_eval", "eval", "total")]
    assert all(isinstance(duration, int) and duration > 0 for duration in durations)
    assert durations[2] >= durations[0] + durations[1]


def test_chat_is_a_stream_of_lines_by_default(served: ServerProcess, expected: str) -> None:
    *pieces, last = lines(served, "/api/chat", {"messages": USER, "options": OPTIONS})
    assert "".join(line["message"]["content"] for line in (*pieces, last)) == expected
    assert not any(line["done"] for line in pieces)
    assert {line["message"]["role"] for line in pieces} == {"assistant"}
    check_summary(last)
    body = {"model": served.model, "messages": USER, "options": OPTIONS, "stream": False}
    whole = served.post("/api/chat", body).json()
    assert whole["message"] == {"role": "assistant", "content": expected}
    assert whole.keys() == last.keys()
    check_summary(whole)


def test_generate_puts_the_prompt_into_the_template_unless_it_is_raw(
    served: ServerProcess, alone: Model, expected: str
) -> None:
    body: Any = {"prompt": USER[0]["content"], "options": OPTIONS}
    *pieces, last = lines(served, "/api/generate", body)
    assert "".join(line["response"] for line in (*pieces, last)) == expected
    check_summary(last)
    body = {"prompt": "What is", "raw": True, "stream": False, "options": OPTIONS}
    raw = served.post("/api/generate", body | {"model": served.model}).json()
    options: dict[str, Any] = {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 3}
    expected = alone.generate("What is", max_new_tokens=30, penalize_prompt=False, **options)
    assert raw["response"] == expected
    system = served.post(
        "/api/generate",
        {"model": served.model, "prompt": "x", "system": "y", "stream": False, "options": OPTIONS},
    )
    messages = [{"role": "system", "content": "y"}, {"role": "user", "content": "x"}]
    body = {"model": served.model, "messages": messages, "stream": False, "options": OPTIONS}
    answer = served.post("/api/chat", body).json()
    assert system.json()["response"] == answer["message"]["content"]


def test_model_without_a_template_continues_the_prompt(chat_model: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_model, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) | {"chat_template": None}
    file.write_text(json.dumps(config))
    model = open_model(tmp_path / "model", EngineOptions(device="cpu", threads=1))
    request, _ = read_generate(b'{"model": "m", "prompt": "What is"}', "m")
    assert prepare(model, request, 9).requests[0].prompt == model.encode("What is")
    with pytest.raises(HttpError, match="the model 'm' has no usable chat template"):
        apply_template(model, "m", {"messages": USER})
    assert show(model, "m", {})["capabilities"] == ["completion"]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"const": 1}}}])
def test_format_constrains_the_text(served: ServerProcess, form: Any) -> None:
    body = {"messages": USER, "format": form, "options": {"seed": 1, "num_predict": 3}}
    *_, last = pieces = lines(served, "/api/chat", body)
    assert "".join(line["message"]["content"] for line in pieces)[0] in "{ \n"
    assert last["done"]


EMPTY_ANSWER = {"response": ""}
EMPTY_MESSAGE = {"message": {"role": "assistant", "content": ""}}


@pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("/api/generate", {}, EMPTY_ANSWER),
        ("/api/generate", {"prompt": "", "keep_alive": 0, "raw": True}, EMPTY_ANSWER),
        ("/api/chat", {}, EMPTY_MESSAGE),
        ("/api/chat", {"messages": [], "truncate": True, "shift": True}, EMPTY_MESSAGE),
    ],
)
def test_request_without_a_prompt_only_loads_the_model(
    served: ServerProcess, path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    body = body | {"options": OPTIONS}
    (line,) = lines(served, path, body)
    assert line | {"done": True, "done_reason": "load"} | empty == line
    whole = served.post(path, body | {"model": served.model, "stream": False})
    assert whole.json().keys() == line.keys()


def test_models_and_version(served: ServerProcess) -> None:
    assert served.http.get("/api/version").json()["version"].count(".") == 2
    (model,) = served.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == f"{served.model}:latest"
    shown = served.post("/api/show", {"model": model["name"]}).json()
    info = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 2048
    assert shown["capabilities"] == ["completion"]
    (loaded,) = served.http.get("/api/ps").json()["models"]
    assert loaded["name"] == loaded["model"] == model["name"]
    assert loaded["digest"] == model["digest"]
    assert len(model["digest"]) == 64
    assert loaded["context_length"] == 2048
    assert loaded["size"] > 0
    assert loaded["details"] == shown["details"]
    assert datetime.fromisoformat(loaded["expires_at"]).year > 2100
    missing = served.post("/api/show", {"name": "other"})
    assert missing.status_code == 404
    assert "'other' does not exist" in missing.json()["error"]


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        ("chat", "options", {"num_predict": -3}, "options.num_predict: invalid value -3"),
        ("chat", "options", {"mirostat": 1}, "options.mirostat is not supported"),
        ("chat", "options", {"temperature": "hot"}, "options.temperature: invalid value"),
        ("chat", "options", {"repeat_penalty": -1}, "options.repeat_penalty: invalid value -1"),
        ("chat", "options", {"samplers": ["x"]}, "options.samplers: invalid value"),
        ("chat", "format", {"type": "x"}, "format: type: "),
        ("chat", "format", {"x": "y" * 70_000}, "format: invalid value"),
        ("chat", "options", {"n": 3}, "options.n is not supported"),
        ("chat", "options", {"stream": True}, "options.stream is not supported"),
        ("chat", "options", {"max_tokens": 5}, "options.max_tokens is not supported"),
        ("chat", "format", "xml", "a JSON schema"),
        ("chat", "think", True, "think is not supported"),
        ("chat", "messages", [{"role": "user", "images": ["x"]}], 'value ["x"], expected no '),
        ("chat", "model", "other", "'other' does not exist"),
        ("chat", "prompt", "x", "prompt is not supported"),
        ("generate", "suffix", "x", "suffix is not supported"),
        ("generate", "prompt", 5, "prompt: invalid value 5"),
        ("embed", "input", "x", "/api/embed is not supported"),
        ("pull", "name", "x", "GET / lists"),
    ],
)
def test_what_is_not_supported_is_named(
    served: ServerProcess, path: str, field: str, value: object, words: str
) -> None:
    prompts = {"chat": {"messages": USER}, "generate": {"prompt": "x"}}
    body = {"model": served.model} | prompts.get(path, {}) | {field: value}
    answer = served.post(f"/api/{path}", body)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]


def test_a_second_constraint_is_named_as_it_was_sent() -> None:
    body: Any = {"model": "m", "prompt": "x", "format": "json", "options": {"regex": "x"}}
    with pytest.raises(HttpError, match=r"^options\.regex: .* \(got format\)$") as error:
        read_generate(json.dumps(body).encode(), "m")
    assert error.value.param == "options.regex"


def test_body_must_be_json(served: ServerProcess) -> None:
    for content, headers in ((b"{", JSON), (b"{}", {}), (b"x=1", {"Origin": "null"})):
        answer = served.http.post("/api/chat", content=content, headers=headers)
        assert answer.status_code == (415 if "Origin" in headers else 400)
        assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1, 2]},
        {"messages": USER, "tools": [1, 2]},
        {"messages": [{"role": "assistant", "tool_calls": [1, 2]}]},
    ],
)
def test_a_list_of_invalid_items_is_one_error(fields: Any) -> None:
    with pytest.raises(HttpError) as error:
        read_chat(json.dumps({"model": "m"} | fields).encode(), "m")
    assert isinstance(error.value.__context__, ValidationError)
    assert error.value.__context__.error_count() == 1


def test_what_asks_for_nothing_is_accepted() -> None:
    body: Any = {"model": "m", "prompt": "x", "suffix": "", "images": [], "context": None}
    body |= {"keep_alive": "5m", "think": False, "format": "", "template": "", "options": None}
    request, _ = read_generate(json.dumps(body).encode(), "m")
    assert isinstance(request, ChatRequest)
    assert request.stream
    request, _ = read_generate(b'{"model": "m", "prompt": "x", "raw": true}', "m")
    assert request.max_tokens == -1
    body = {
        "model": "m",
        "messages": USER,
        "tools": [],
        "tool_choice": "auto",
        "logprobs": False,
        "options": {"num_predict": -1, "top_k": None},
    }
    request, _ = read_chat(json.dumps(body).encode(), "m")
    assert request.max_tokens == -1


def test_sampling_fields_beside_the_options_count_unless_an_option_is_given() -> None:
    body: Any = {"model": "m", "messages": USER, "temperature": 0.5, "max_output_tokens": 7}
    request, _ = read_chat(json.dumps(body).encode(), "m")
    assert (request.temperature, request.max_tokens) == (0.5, 7)
    options = {"temperature": 0.25, "num_predict": 3}
    request, _ = read_chat(json.dumps(body | {"options": options}).encode(), "m")
    assert (request.temperature, request.max_tokens) == (0.25, 3)
    for field in ("temperature", "top_p", "max_output_tokens"):
        with pytest.raises(HttpError, match=f'^{field}: invalid value "x"') as error:
            read_chat(json.dumps(body | {field: "x"}).encode(), "m")
        assert error.value.param == field


def test_choice_of_a_tool_is_that_of_a_chat() -> None:
    body: Any = {"model": "m", "messages": USER, "tools": [WEATHER], "tool_choice": NAMED}
    request, _ = read_chat(json.dumps(body).encode(), "m")
    assert isinstance(request, ChatRequest)
    assert request.tool_choice == ("required", "weather")


def test_calls_of_a_stream_come_together_at_its_end() -> None:
    _, form = read_chat(json.dumps({"model": "m", "messages": USER}).encode(), "m")
    parts = [("f", '{"x"'), ("", ": 1}")]
    deltas: list[Any] = [{"role": "assistant", "content": ""}, {"content": "So."}]
    deltas += [
        {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": part}}]}
        for name, part in parts
    ]
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}]
    stream = form.chunks(chunks) + form.end(Job([], stream=True))
    text, last = map(json.loads, stream.splitlines())
    assert text["message"] == {"role": "assistant", "content": "So."}
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    assert last["message"] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert last["done_reason"] == "stop"


def test_a_call_that_the_limit_cuts_is_left_out() -> None:
    _, form = read_chat(json.dumps({"model": "m", "messages": USER}).encode(), "m")
    parts = ['{"x": 1}', '{"x": "lo', ""]
    calls = [{"function": {"name": "f", "arguments": part}} for part in parts]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    answer = {"choices": [{"message": message, "finish_reason": "length"}]}
    whole = form.whole(answer, Job([], stream=False))
    assert whole["message"]["tool_calls"] == [{"function": {"name": "f", "arguments": {"x": 1}}}]
    assert whole["done_reason"] == "length"


def test_calls_and_results_of_a_conversation_belong_together() -> None:
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in "fg"]
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "one", "tool_name": "f"},
        {"role": "tool", "content": "two", "tool_name": "g"},
    ]
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    body = {"model": "m", "messages": messages, "tools": tools}
    request, _ = read_chat(json.dumps(body).encode(), "m")
    assert isinstance(request, ChatRequest)
    _, assistant, *results = request.conversation
    assert [call["function"] for call in assistant["tool_calls"]] == [
        call["function"] for call in calls
    ]
    assert [(one["name"], one["content"]) for one in results] == [("f", "one"), ("g", "two")]


def results_of(calls: list[Any], results: list[Any]) -> list[tuple[str, str]]:
    """Return the function's name and the content of each result in a conversation."""
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "images": None} | result for result in results]
    request, _ = read_chat(json.dumps({"model": "m", "messages": messages}).encode(), "m")
    assert isinstance(request, ChatRequest)
    return [(one["name"], one["content"]) for one in request.conversation[2:]]


def test_results_in_another_order_belong_to_the_calls_that_they_name() -> None:
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in "ffg"]
    named = [{"content": "1", "tool_name": "g"}, {"content": "2", "tool_name": "f"}]
    expected = [("g", "1"), ("f", "2"), ("f", "3")]
    assert results_of(calls, [*named, {"content": "3"}]) == expected
    with_ids = [call | {"id": f"id{i}"} for i, call in enumerate(calls)]
    results = [{"content": f"{i}", "tool_call_id": f"id{i}"} for i in (2, 1, 0)]
    assert results_of(with_ids, results) == [("g", "2"), ("f", "1"), ("f", "0")]


def test_null_fields_of_messages_are_as_if_not_given() -> None:
    nothing = dict.fromkeys(("content", "images", "tool_calls", "tool_name", "tool_call_id"))
    messages = [*USER, {"role": "assistant"} | nothing, {"role": "user"} | nothing]
    request, _ = read_chat(json.dumps({"model": "m", "messages": messages}).encode(), "m")
    assert isinstance(request, ChatRequest)
    assert [message["content"] for message in request.conversation[1:]] == ["", ""]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"response_format": {"type": "text"}}, "options.response_format is not supported"),
        ({"temperature": "hot"}, "options.temperature: invalid value"),
        ({"num_predict": -3}, "options.num_predict: invalid value -3"),
        ({"temprature": 1}, "unknown field 'options.temprature': did you mean temperature?"),
        ({"structured_outputs": {}}, "options.structured_outputs: no constraint"),
    ],
)
@pytest.mark.parametrize("prompt", ["x", ""])
def test_options_are_checked_and_named_as_sent(
    options: dict[str, Any], error: str, prompt: str
) -> None:
    body = {"model": "m", "prompt": prompt, "options": options}
    with pytest.raises(HttpError) as raised:
        read_generate(json.dumps(body).encode(), "m")
    assert raised.value.message.startswith(error)


def test_a_model_is_loaded_whatever_the_options_require(loaded: LoadedModel) -> None:
    options = {"require": ["look"], "min_tokens": 3, "num_predict": 9}
    for fields in ({"options": options}, {"format": "json", "stream": False}):
        request, _ = read_generate(json.dumps({"model": "m"} | fields).encode(), "m")
        [load] = prepare(loaded, request, 9).requests
        assert load.sampling.max_new_tokens == 0
