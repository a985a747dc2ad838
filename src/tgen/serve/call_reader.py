"""The content and the tool calls in a text, read as it is generated."""

import secrets
import string
from typing import Any

from tgen.chat.call_syntax import CallSyntax
from tgen.serve.call_form import CallForm

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other
_FIRST_MARK = 0xD800  # a surrogate, which is in no text


class CallReader:
    """The content and the calls of a text, as it comes.

    `calls` are the calls so far, `deltas` what is new of them since they were taken.
    """

    def __init__(self, form: CallForm) -> None:
        self._only_at_start = form.only_at_start
        self._must_call = form.choice.mode == "required"
        self._names = {i: name for name, i in form.controls.items()}
        self._waiting = ""  # text that may be the start of a call
        self._read = self._read_text
        # Control tokens are marks, here and in the syntax: a text that spells their names is text.
        self._marks = {name: chr(_FIRST_MARK + k) for k, name in enumerate(form.controls)}
        opener, middle, separator, closer = (
            "".join(self._marks.get(part, part) for part in form.split(text))
            for text in form.syntax[:4]
        )
        self._syntax = CallSyntax(opener, middle, separator, closer)
        self._opener = self._syntax.opener
        self._depth, self._in_string, self._escaped = 0, False, False  # within the arguments
        self.calls: list[dict[str, Any]] = []
        self.deltas: list[dict[str, Any]] = []

    def feed(self, token: int, text: str, *, last: bool) -> str:
        """Add a token's text; return the content that is new."""
        self._waiting += self._marks[name] if (name := self._names.get(token)) else text
        content, before = "", None
        while before != (self._read, self._waiting):
            before = self._read, self._waiting
            content += self._read()
        if last and self._read == self._read_text:
            content += "" if self._must_call else self._waiting  # the limit may cut a call off
            self._waiting = ""
        for name, mark in self._marks.items():  # of a call that has no name yet at its end
            content = content.replace(mark, name)
        return content

    def take_deltas(self) -> list[dict[str, Any]]:
        """Return what is new of the calls since the last time."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def _read_text(self) -> str:
        """Return the text that cannot be part of a call."""
        trigger, text = self._syntax.trigger, self._waiting
        at = text.find(trigger)
        if at == 0 or (at > 0 and not self._only_at_start):
            self._read, self._waiting = self._read_name, text[at:]
            return text[:at].rstrip()
        if self._only_at_start:
            n = 0 if trigger.startswith(text) else len(text)
            if n:
                self._read = self._read_content
        else:  # the white space before a call is not content
            starts = range(max(0, len(text) - len(trigger)), len(text))
            n = next((i for i in starts if trigger.startswith(text[i:])), len(text))
            n = len(text[:n].rstrip())
        self._waiting = text[n:]
        return text[:n]

    def _read_content(self) -> str:
        text, self._waiting = self._waiting, ""
        return text

    def _read_name(self) -> str:
        """Start a call if the text has what is before its arguments."""
        name, middle, rest = self._waiting.partition(self._syntax.middle)
        if middle:
            self._waiting, self._read = rest, self._read_arguments
            identifier = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
            function = {"name": name.removeprefix(self._opener), "arguments": ""}
            call = {"id": identifier, "type": "function", "function": function}
            self.calls.append(call)
            self.deltas.append({"index": len(self.calls) - 1, **call, "function": {**function}})
        return ""

    def _read_arguments(self) -> str:
        """Add to the arguments up to their last brace."""
        text, n = self._waiting, 0
        while n < len(text) and self._read == self._read_arguments:
            character, n = text[n], n + 1
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self._read = self._read_separator
        if n:
            self._waiting, index = text[n:], len(self.calls) - 1
            self.calls[-1]["function"]["arguments"] += text[:n]
            last = self.deltas[-1] if self.deltas else {}
            # As with OpenAI, no arguments are beside the name: some clients would not see them.
            if last.get("index") != index or "id" in last:
                self.deltas.append({"index": index, "function": {"arguments": ""}})
            self.deltas[-1]["function"]["arguments"] += text[:n]
        return ""

    def _read_separator(self) -> str:
        separator = self._syntax.separator
        if separator and self._waiting.startswith(separator):
            self._waiting, self._opener = self._waiting.removeprefix(separator), ""
            self._read = self._read_name
        return ""
