"""Conversations: JSONL rows of {"messages": [...]}, checked before anything is tokenized.

`{"prompt", "completion"}` is a conversation of two messages if the user asks for it with --chat.
"""

import json
from typing import Any, NamedTuple

from tgen.errors import CorpusError

_ROLES = ("system", "user", "assistant", "tool")
_KEYS = {"role", "content", "weight"}
SHOWN = 50  # characters of a value in an error
_EXAMPLE = (
    'write {"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]} on each line'
)


class Conversation(NamedTuple):
    """Messages, each with a role and a content."""

    messages: list[dict[str, str]]
    answers: list[int]  # indices of the assistant's messages that are in the loss

    def content(self) -> bytes:
        """Return bytes that are equal for equal conversations, to find duplicates."""
        texts = [[message["role"], message["content"]] for message in self.messages]
        return json.dumps([texts, self.answers]).encode()


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def pair_messages(prompt: Any, answer: Any) -> list[dict[str, Any]]:
    """Return a prompt and its answer as messages."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def is_conversation(line: bytes) -> bool:
    """Return whether a line is a JSON object with messages, valid or not."""
    values = parse_json(line)
    return isinstance(values, dict) and "messages" in values


def parse_conversation(line: bytes) -> Conversation:
    """Parse a row. Raises CorpusError, without the number of the line, if it is invalid."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise invalid_row_error(line, _EXAMPLE)
    if row.get("tools"):
        raise CorpusError(
            "the row has tools, which are not supported",
            "describe the tools in the system message, and remove the key",
        )
    if "messages" in row:
        return check_messages(row["messages"])
    if "prompt" in row and "completion" in row:
        return check_messages(pair_messages(row["prompt"], row["completion"]))
    raise invalid_row_error(line, _EXAMPLE)


def invalid_row_error(line: bytes, example: str) -> CorpusError:
    """Return the error for a line that is not a canonical row, as those of other files become."""
    shown = repr(line[:SHOWN].decode(errors="replace"))
    return CorpusError(f"not a valid row (got {shown})", example)


def check_messages(messages: Any) -> Conversation:
    """Return a row's messages and the answers to learn: those after a user's message.

    An answer before it is a greeting, which is context. Raises CorpusError.
    """
    if not isinstance(messages, list) or not messages:
        raise CorpusError("messages is not a list of messages", _EXAMPLE)
    checked: list[dict[str, str]] = []
    answers = []
    was_asked = False
    for number, message in enumerate(messages, 1):
        role, content, weight = _check_message(number, message)
        if role == "system" and checked:
            raise CorpusError(
                f"message {number} is a system message (only the first may be)",
                "move it to the start of the row",
            )
        was_asked = was_asked or role in ("user", "tool")
        if weight and was_asked:
            answers.append(len(checked))
        checked.append({"role": role, "content": content})
    if not answers:
        raise CorpusError(
            "no assistant message with weight 1 after one of the user, so nothing to learn",
            "remove the row",
        )
    return Conversation(checked, answers)


def _check_message(number: int, message: Any) -> tuple[str, str, bool]:
    """Return role, content, and whether it is an answer to learn."""
    given = message if isinstance(message, dict) else {}
    given = {key: value for key, value in given.items() if value is not None}
    role, content = given.get("role"), given.get("content")
    if role not in _ROLES or not isinstance(content, str) or given.keys() - _KEYS:
        shown = json.dumps(message)[:SHOWN]
        hint = f"write a role ({', '.join(_ROLES)}), a content and nothing else but a weight"
        raise CorpusError(f"message {number} is not valid (got {shown})", hint)
    try:
        content.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise CorpusError(f"message {number} contains an unpaired surrogate", "remove it") from None
    weight = given.get("weight", 1)
    if type(weight) not in (int, float) or weight not in (0, 1):
        got = json.dumps(weight)[:SHOWN]
        raise CorpusError(
            f"message {number} has the weight {got} (expected 0 or 1)", "set it to 1 or 0"
        )
    if "weight" in given and role != "assistant":
        raise CorpusError(
            f"message {number} of the {role} has a weight", "remove it: only answers are learned"
        )
    return role, content, role == "assistant" and weight == 1
