"""The syntax in which a chat template writes tool calls, seen in what it renders.

A probe conversation that ends with calls is rendered beside one that ends with a text. What differs
is the syntax: before the name, between name and arguments, between calls, and after the last one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tgen.chat.render import FailedTemplateError, RejectedMessagesError

# Renders messages with tools, without the start of another answer.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


class CallSyntax(NamedTuple):
    """The texts around the names and JSON arguments of calls."""

    opener: str  # before the first name
    middle: str  # between a name and its arguments
    separator: str  # between arguments and the next name; empty: one call per answer
    closer: str  # after the last arguments
    rendered: bool = True  # the template writes calls; otherwise they are part of a message's text

    @property
    def trigger(self) -> str:
        """The start of the opener that tells a call from a text, without the JSON after it."""
        start = re.search(r'\s*\[?\s*\{\s*"', self.opener)
        marker = self.opener[: start.start()] if start else self.opener
        return marker or self.opener.rstrip(' "')

    @property
    def only_at_start(self) -> bool:
        """Whether only an answer that starts with the trigger is a call: it is mere JSON."""
        return self.trigger[0] in "[{" and '"' in self.trigger

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return calls, given as names and arguments, as the model writes them."""
        texts = [
            name + self.middle + json.dumps(given, ensure_ascii=False) for name, given in calls
        ]
        if self.separator:
            return self.opener + self.separator.join(texts) + self.closer
        return "\n".join(self.opener + text + self.closer for text in texts)


def read_arguments(given: Any) -> Any:
    """Return the arguments of a call as templates expect them: as an object, not as JSON in a
    string, which is OpenAI's form. An empty string or None means no arguments."""
    try:
        read = json.loads(given) if isinstance(given, str) and given else given
    except (ValueError, RecursionError):  # a text that its limit ended
        return given
    return {} if read in (None, "") else read


# The call of a model whose template has no syntax that is known.
PLAIN = CallSyntax('{"name": "', '", "arguments": ', "", "}", rendered=False)
# Templates that ask for calls but do not write them: what they say -> the syntax.
_SYNTAX_BY_INSTRUCTION = {
    r"<\|tool_call\|> followed by a JSON list": CallSyntax(
        '<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]", rendered=False
    ),
    r'<tool_call>(\\n|\s)*\{\\?"name\\?": ': CallSyntax(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        "}\n</tool_call>",
        rendered=False,
    ),
}
_NAMES, _IDS = ("first_probe", "second_probe"), ("probeid01", "probeid02")
_TEXT, _KEY, _VALUE = "Probe answer.", "probe_key", "probe value"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}')
_ID = re.compile("|".join(rf', "id": "{i}"|"id": "{i}", ' for i in _IDS))
_QUESTION = {"role": "user", "content": "Probe question?"}


def find_call_syntax(render: Render, source: str) -> CallSyntax | None:
    """Return the syntax of a template, whose text is `source`; None if tgen does not know it, or
    if the template does not show the tools to the model.

    Raises ModelError if the template exceeds a limit, which may be that of a busy machine.
    """
    tools = [_describe(name) for name in _NAMES]
    with suppress(RejectedMessagesError, FailedTemplateError):
        plain = render([_QUESTION, {"role": "assistant", "content": _TEXT}], tools)
        before, _, after = plain.rpartition(_TEXT)
        if not all(name in before for name in _NAMES):
            return None
        for n in (2, 1):
            found = _probe(render, tools, n, before, after)
            if found is not None:
                return found
        for pattern, syntax in _SYNTAX_BY_INSTRUCTION.items():
            if re.search(pattern, source):
                return syntax
    return None


def _describe(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {_KEY: {"type": "string", "description": "A probe."}},
        "required": [_KEY],
    }
    function = {"name": name, "description": "Probe.", "parameters": parameters}
    return {"type": "function", "function": function}


def _probe(
    render: Render, tools: Sequence[Mapping[str, Any]], n: int, before: str, after: str
) -> CallSyntax | None:
    """Return the syntax of `n` calls, rendered between `before` and `after`; None if unclear."""
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": {_KEY: _VALUE}}}
        for i, name in zip(_IDS[:n], _NAMES, strict=False)
    ]
    try:
        text = render([_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}], tools)
    except (RejectedMessagesError, FailedTemplateError):
        return None
    before, text, after = before.rstrip(), _ID.sub("", text).rstrip(), after.strip()
    if not text.startswith(before) or not text.endswith(after) or any(i in text for i in _IDS):
        return None
    text = text[len(before) : len(text) - len(after)].strip()
    parts = re.split("|".join(_NAMES[:n]), _ARGUMENTS.sub("\0", text))
    if [part.count("\0") for part in parts] != [0] + [1] * n:
        return None
    (middle, separator), (other, closer) = parts[1].split("\0"), parts[-1].split("\0")
    if not parts[0] or not middle or middle != other:
        return None
    return CallSyntax(parts[0], middle, separator if n == 2 else "", closer)
