"""Messages that a chat template leaves out of its text: an error, since the model misses them."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from tgen.chat.render import Message, RejectedMessagesError
from tgen.errors import UsageError

_KNOWN_ROLES = ("user", "assistant")
_MAX_CHANGED = 32  # of the last messages
_ADDED = "x"  # to a message, to see whether the text changes


def check_complete(
    messages: Sequence[Message], text: str, render: Callable[[list[Message]], str]
) -> None:
    """Raise UsageError for a message that the template leaves out of `text`, which `render` writes
    of these messages.

    A message whose words are in the text may be there by chance: if it has another role than
    user and assistant, or if words of others are not there, it is changed, and the text must
    change. Templates may leave out the words beside calls.
    """
    contents, at = [message["content"].strip() for message in messages], 0
    for content in contents:
        found = text.find(content, at)
        at = len(text) + 1 if found < 0 else found + len(content)
    for i in range(max(0, len(messages) - _MAX_CHANGED), len(messages)):
        if at <= len(text) and messages[i]["role"] in _KNOWN_ROLES:
            continue
        if "tool_calls" in messages[i]:
            continue
        changed = {**messages[i], "content": f"{contents[i]} {_ADDED}"}
        with suppress(RejectedMessagesError):
            other = render([*messages[:i], changed, *messages[i + 1 :]])
            if contents[i] and other == text:
                role = messages[i]["role"]
                hint = f"use a role that it knows, such as {' or '.join(_KNOWN_ROLES)}, or remove "
                hint += "the message"
                if role in _KNOWN_ROLES:
                    hint = "use another template, or remove the message"
                raise UsageError(
                    f"the chat template leaves out message {i + 1}, of the role {role[:40]!r}", hint
                )
