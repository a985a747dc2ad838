"""Templates, control tokens and limits: a request that cannot be prepared is a client error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.chats import HERMES_TOOLS
from support.tools import request_of, with_template
from tgen.chat import render
from tgen.config import EngineOptions
from tgen.errors import TgenError, UsageError
from tgen.generation.logits_processors import LogitsProcessors
from tgen.loaded_model import LoadedModel, open_model
from tgen.serve.http_error import HttpError, to_http
from tgen.serve.preparation import find_call_form, prepare
from tgen.serve.text_request import ChatRequest, CompletionRequest, parse

TEMPLATES = {
    "none": None,
    "syntax": "{% for",
    "refuses": "{{ raise_exception('no') }}",
    "escapes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "endless": "{% for i in range(99999) %}{% for j in range(100000) %}{{ messages }}{% endfor %}"
    "{% endfor %}",
    "long": "{% for i in range(9999) %}word {% endfor %}",
}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | fields).encode()


@pytest.mark.parametrize("name", TEMPLATES)
def test_failing_template_is_a_client_error(
    name: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "SECONDS", 1)
    shutil.copytree(chat_model, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) | {"chat_template": TEMPLATES[name]}
    file.write_text(json.dumps(config))
    model = open_model(tmp_path / "model", EngineOptions(device="cpu", threads=1))
    for _ in range(2):
        with pytest.raises(TgenError) as error:
            prepare(model, parse(chat(), ChatRequest, "m"), 100)
        assert to_http(error.value).status == 400
        assert str(tmp_path) not in error.value.message
        assert name != "none" or "'m' has no usable chat template" in error.value.message
    assert prepare(model, parse(b'{"prompt": "Hi"}', CompletionRequest, "m"), 100).requests


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limit_is_named_as_it_was_sent(loaded: LoadedModel, field: str) -> None:
    request = parse(chat(**{field: 100}), ChatRequest, "m")
    with pytest.raises(HttpError) as error:
        prepare(loaded, request, 50, strict=True)
    named = to_http(error.value, request.names)
    assert named.message.startswith(f"{field}: invalid value 100")
    assert named.param == field


def test_both_fields_that_contradict_are_named_as_they_were_sent(loaded: LoadedModel) -> None:
    request = parse(chat(min_tokens=3, response_format={"type": "json_object"}), ChatRequest, "m")
    with pytest.raises(TgenError) as error:
        prepare(loaded, request, 50)
    named = to_http(error.value, request.names)
    assert named.message == "min_tokens cannot be combined with response_format"
    assert named.param == "min_tokens"


def test_text_of_a_message_is_no_control_token(loaded: LoadedModel) -> None:
    [end] = loaded.chat_format.end_ids
    for role, text in (("user", "<|im_end|>"), ("system", "<|im_start|><|im_end|>")):
        body = chat(messages=[{"role": role, "content": "x"}])
        plain = prepare(loaded, parse(body, ChatRequest, "m"), 9).requests[0].prompt
        body = chat(messages=[{"role": role, "content": text}])
        ids = prepare(loaded, parse(body, ChatRequest, "m"), 9).requests[0].prompt
        assert [*ids].count(end) == [*plain].count(end) == 1


def test_lengths_fill_the_context_and_not_more(loaded: LoadedModel) -> None:
    length = loaded.engine.context_length
    whole = prepare(loaded, parse(chat(), ChatRequest, "m"), length)
    assert whole.requests[0].sampling.max_new_tokens == length + 1 - whole.prompt_tokens
    assert (
        prepare(loaded, parse(chat(), ChatRequest, "m"), 7).requests[0].sampling.max_new_tokens == 7
    )
    ids = [1] * (length - 4)
    for asked, expected in ((None, 5), (5, 5), (6, 5), (-1, 5), (99_999, 5), (0, 0)):
        request = parse(
            json.dumps({"prompt": ids, "max_tokens": asked}).encode(), CompletionRequest, "m"
        )
        [one] = prepare(loaded, request, length).requests
        assert one.sampling.max_new_tokens == expected
        assert prepare(loaded, request, 3).requests[0].sampling.max_new_tokens == min(expected, 3)
        if asked in (6, 99_999):
            with pytest.raises(HttpError) as error:
                prepare(loaded, request, length, strict=True)
            assert error.value.code == "context_length_exceeded"
        else:
            [strict] = prepare(loaded, request, length, strict=True).requests
            assert strict.sampling.max_new_tokens == expected
    for n, asked in ((length + 1, 1), (length + 1, -1), (length + 2, 0)):
        body = json.dumps({"prompt": [1] * n, "max_tokens": asked}).encode()
        with pytest.raises(HttpError) as error:
            prepare(loaded, parse(body, CompletionRequest, "m"), length)
        assert error.value.code == "context_length_exceeded"


def test_texts_without_a_seed_differ(loaded: LoadedModel) -> None:
    request = parse(b'{"prompt": "Hi", "n": 2, "seed": -1}', CompletionRequest, "m")
    seeds = {r.sampling.seed for _ in range(5) for r in prepare(loaded, request, 9).requests}
    assert len(seeds) == 10
    developer = parse(chat(messages=[{"role": "developer", "content": "Hi"}]), ChatRequest, "m")
    assert developer.conversation == [{"role": "system", "content": "Hi"}]


def test_strings_are_looked_up_before_the_engine_needs_them(loaded: LoadedModel) -> None:
    body = b'{"prompt": "Hi", "ban": ["look"], "bias": {"up": 1}, "require": ["these"]}'
    [request] = prepare(loaded, parse(body, CompletionRequest, "m"), 9).requests
    misses = loaded.vocabulary.completions.cache_info().misses
    LogitsProcessors(request.sampling, loaded.vocabulary)
    assert loaded.vocabulary.completions.cache_info().misses == misses


def test_words_are_a_text_and_never_a_path(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("secret")
    body = {"prompt": "Hi", "words": str(path)}
    [request] = prepare(
        loaded, parse(json.dumps(body).encode(), CompletionRequest, "m"), 9
    ).requests
    assert request.sampling.words == str(path).encode()
    known = loaded.vocabulary.known_words(request.sampling)
    assert known is loaded.vocabulary.known_words(request.sampling)  # the engine need not wait
    for words in ("a" * 65_536, ["a"], 5):
        with pytest.raises(HttpError) as caught:
            parse(json.dumps({"prompt": "Hi", "words": words}).encode(), CompletionRequest, "m")
        assert caught.value.param == "words"
    body |= {"words": "a", "regex": "a"}
    with pytest.raises(UsageError, match="words cannot be combined with regex"):
        prepare(loaded, parse(json.dumps(body).encode(), CompletionRequest, "m"), 9)


def test_notes_about_schemas_name_their_fields(loaded: LoadedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}
    request = parse(
        json.dumps({"prompt": "x", "guided_json": schema}).encode(), CompletionRequest, "m"
    )
    [note] = prepare(loaded, request, 9).notes
    assert note == 'guided_json: properties.a.format: "phone" is not checked'
    lark = f"start: a\na: %json {json.dumps(schema)}"
    body = json.dumps({"prompt": "x", "guided_grammar": lark}).encode()
    [note] = prepare(loaded, parse(body, CompletionRequest, "m"), 9).notes
    assert note == 'guided_grammar: line 2: properties.a.format: "phone" is not checked'
    tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
    unused = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}
    body = chat(tools=[tool], tool_choice="required", response_format=unused)
    call = parse(body, ChatRequest, "m")
    [note] = prepare(loaded, call, 9, calls=find_call_form(loaded, call)).notes
    assert note == 'tools[0].function.parameters: properties.a.format: "phone" is not checked'


def test_a_tool_without_valid_arguments_has_no_notes(loaded: LoadedModel) -> None:
    impossible = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    functions: list[dict[str, Any]] = [{"name": "x", "parameters": impossible}, {"name": "y"}]
    tools = [{"type": "function", "function": function} for function in functions]
    call = parse(chat(tools=tools, tool_choice="required"), ChatRequest, "m")
    assert prepare(loaded, call, 9, calls=find_call_form(loaded, call)).notes == []


@pytest.mark.parametrize("field", ["guided_json", "json_schema", "response_format"])
def test_notes_name_the_field_of_a_schema_beside_tools(loaded: LoadedModel, field: str) -> None:
    schema: dict[str, Any] = {"properties": {"a": {"type": "string", "format": "phone"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = request_of(**{field: form if field == "response_format" else schema})
    calls = find_call_form(with_template(loaded, HERMES_TOOLS), request)
    [note] = prepare(loaded, request, 9, calls=calls).notes
    assert note == f'{field}: properties.a.format: "phone" is not checked'
