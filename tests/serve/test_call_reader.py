"""Content and calls of texts, as they come."""

import json

import pytest

from support.chats import HERMES_TOOLS, LLAMA_TOOLS, MISTRAL_TOOLS
from support.tools import request_of, with_template
from tgen.config import SamplingConfig
from tgen.loaded_model import LoadedModel
from tgen.serve.call_reader import CallReader
from tgen.serve.preparation import find_call_form

CALL = '"arguments": {"city": "Rome", "unit": "C"}}'
# Template -> texts of the model, with their content and the number of calls; None: not possible.
TEXTS: list[tuple[str, str, str | None, int]] = [
    (HERMES_TOOLS, "Hello <tool> and <tool_call", "Hello <tool> and <tool_call", 0),
    (HERMES_TOOLS, f'<tool_call>\n{{"name": "weather", {CALL}\n</tool_call>', "", 1),
    (
        HERMES_TOOLS,
        f'Wait. \n<tool_call>\n{{"name": "weather", {CALL}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Wait.",
        2,
    ),
    (HERMES_TOOLS, "<tool_call> later", None, 0),
    (HERMES_TOOLS, '<tool_call>\n{"name": "other"', None, 0),
    (HERMES_TOOLS, '<tool_call>\n{"name": "now", "arguments": {"a"', None, 0),
    (LLAMA_TOOLS, '{"name": "now", "parameters": {}}', "", 1),
    (LLAMA_TOOLS, '{"names": {"name": "now"}}', '{"names": {"name": "now"}}', 0),
    (LLAMA_TOOLS, '{"name": "other"', None, 0),
]


@pytest.mark.parametrize(("source", "text", "content", "n_calls"), TEXTS)
def test_text_is_read_as_content_and_calls(
    loaded: LoadedModel, source: str, text: str, content: str | None, n_calls: int
) -> None:
    model = with_template(loaded, source)
    form = find_call_form(model, request_of())
    matcher = loaded.vocabulary.grammars.matcher(SamplingConfig(**form.constraint))
    assert matcher
    size = loaded.tokenizer.vocab_size
    ids = loaded.vocabulary.encode(text.encode())
    for i in ids:
        if not matcher.allowed(size)[i]:
            assert content is None
            return
        matcher.accept(i)
    assert matcher.complete == (content is not None)
    for step in (1, 3, len(text)):
        reader, seen = CallReader(form), ""
        arguments: dict[int, str] = {}
        for at in range(0, len(text), step):
            seen += reader.feed(-1, text[at : at + step], last=at + step >= len(text))
            for delta in reader.take_deltas():
                assert "id" not in delta or not delta["function"]["arguments"]
                assert ("id" in delta) == (delta["index"] not in arguments)
                arguments.setdefault(delta["index"], "")
                arguments[delta["index"]] += delta["function"]["arguments"]
        assert seen == content
        assert [call["function"]["arguments"] for call in reader.calls] == [*arguments.values()]
        assert len(reader.calls) == n_calls
        if n_calls:
            first = reader.calls[0]["function"]
            parsed = {"city": "Rome", "unit": "C"} if first["name"] == "weather" else {}
            assert json.loads(first["arguments"]) == parsed


def test_braces_in_strings_do_not_end_arguments(loaded: LoadedModel) -> None:
    tool = {"type": "function", "function": {"name": "say", "parameters": {"properties": {}}}}
    form = find_call_form(with_template(loaded, HERMES_TOOLS), request_of(tools=[tool]))
    arguments = json.dumps({"a": '}\\"]{', "b": [{}, "\\"]})
    reader = CallReader(form)
    reader.feed(-1, form.syntax.write([("say", json.loads(arguments))]), last=True)
    assert reader.calls[0]["function"] == {"name": "say", "arguments": arguments}


def test_text_that_spells_a_control_token_is_content(loaded: LoadedModel) -> None:
    source = MISTRAL_TOOLS.replace("<|tool|> [", "[INST]<|tool|> [")
    form = find_call_form(with_template(loaded, source), request_of())
    assert "[INST]" in form.controls
    text = f"The tag {form.syntax.trigger} starts a call."
    for step in (1, 4, len(text)):
        reader = CallReader(form)
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        fed = [reader.feed(-1, piece, last=piece is pieces[-1]) for piece in pieces]
        assert "".join(fed) == text
        assert reader.calls == []
    reader = CallReader(form)
    content = reader.feed(-1, "So ", last=False)
    content += reader.feed(form.controls["[INST]"], "", last=True)  # the limit ends the text
    assert content == "So [INST]"


@pytest.mark.parametrize(("choice", "expected"), [("auto", '{"'), ("required", "")])
def test_the_beginning_of_a_call_is_content_only_where_no_call_is_required(
    loaded: LoadedModel, choice: str, expected: str
) -> None:
    form = find_call_form(with_template(loaded, LLAMA_TOOLS), request_of(tool_choice=choice))
    assert CallReader(form).feed(-1, '{"', last=True) == expected
