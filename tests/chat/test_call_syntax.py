"""The syntax of calls is that of the template."""

import json

import pytest

from support.chats import (
    CHATML,
    GRANITE_TOOLS,
    HERMES_TOOLS,
    LLAMA_TOOLS,
    MISTRAL_TOOLS,
    SMOLLM_TOOLS,
    TOOLS_END,
    TOOLS_START,
)
from tgen.chat.call_syntax import PLAIN, find_call_syntax
from tgen.chat.render import Sandbox
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.errors import ModelError

# Template -> the texts of one call and of two, and the trigger.
ONE, TWO = ("sum", {"a": 1}), ("now", {})
CASES = {
    HERMES_TOOLS: (
        '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "<tool_call>",
    ),
    MISTRAL_TOOLS: (
        '<|tool|> [{"name": "sum", "arguments": {"a": 1}}]',
        '<|tool|> [{"name": "sum", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "<|tool|>",
    ),
    LLAMA_TOOLS: (
        '{"name": "sum", "parameters": {"a": 1}}',
        '{"name": "sum", "parameters": {"a": 1}}\n{"name": "now", "parameters": {}}',
        '{"name":',
    ),
    GRANITE_TOOLS: (
        '<|tool_call|>[{"name": "sum", "arguments": {"a": 1}}]',
        '<|tool_call|>[{"name": "sum", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "<|tool_call|>",
    ),
    SMOLLM_TOOLS: (
        '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "<tool_call>",
    ),
}


@pytest.fixture(scope="module")
def find():
    """Return a function from a template's text to its syntax."""
    sandbox = Sandbox()

    def find_syntax(source):
        template = ChatTemplate(source, {})

        def render(messages, tools):
            return sandbox.render(template, [messages], prompts=[False], tools=[tools])[0]

        return find_call_syntax(render, source)

    return find_syntax


@pytest.mark.parametrize("source", CASES, ids=range(len(CASES)))
def test_syntax_is_that_of_the_template(find, source):
    one, two, trigger = CASES[source]
    syntax = find(source)
    assert syntax.write([ONE]) == one
    assert syntax.write([ONE, TWO]) == two
    assert syntax.trigger == trigger
    assert syntax.only_at_start == (source == LLAMA_TOOLS)
    assert bool(syntax.separator) == (source != LLAMA_TOOLS)
    assert syntax.rendered == (source not in (GRANITE_TOOLS, SMOLLM_TOOLS))


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        # The model does not see the tools.
        HERMES_TOOLS.replace("if tools", "if other"),
        # Calls are not JSON.
        f"{TOOLS_START}{{% for c in m.tool_calls %}}{{{{- c.function.name + '()' }}}}{{% endfor %}}"
        + TOOLS_END,
        # The identifier is part of the call.
        MISTRAL_TOOLS.replace("'<|tool|> ['", "'<|tool|> [' + m.tool_calls[0].id"),
        "{{ raise_exception('no') }}",
    ],
)
def test_unknown_syntax_is_none(find, source):
    assert find(source) is None


@pytest.mark.parametrize("n_rendered", [0, 1])
def test_a_limit_that_is_exceeded_is_an_error_and_not_an_unknown_syntax(n_rendered):
    texts = ["first_probe second_probe Probe answer."] * n_rendered

    def render(*_):
        if not texts:
            raise ModelError("the chat template took more than 5 s", "")
        return texts.pop()

    with pytest.raises(ModelError, match="more than 5 s"):
        find_call_syntax(render, "")


def test_plain_call_is_json():
    assert json.loads(PLAIN.write([ONE])) == {"name": "sum", "arguments": {"a": 1}}
    assert PLAIN.only_at_start
