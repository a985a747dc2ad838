"""Render chat templates, which are untrusted code, in a process with time and memory limits."""

from collections.abc import Sequence
from typing import Any

from tgen.checkpoint.chat_template import NO_CHAT_HINT, ChatTemplate
from tgen.errors import ModelError, UsageError
from tgen.machine.child import Child

Message = dict[str, Any]  # role and content, texts; perhaps tool_calls, tool_call_id, name
Tools = list[dict[str, Any]] | None  # functions that the model may call, in OpenAI's form
SECONDS, BYTES = 5, 512 << 20  # of CPU time and of memory, where the platform can limit them
_MAX_RESPONSE_BYTES = 64 << 20


class RejectedMessagesError(UsageError):
    """The template rejects a conversation, number `at` of a request."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(
            f"the chat template rejects the messages: {reason}",
            "remove --system, or change the messages",
        )
        self.at = at


class FailedTemplateError(ModelError):
    """The template failed for a conversation, number `at` of a request."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"the chat template failed: {reason}", NO_CHAT_HINT)
        self.at = at


class Sandbox:
    """A process that starts at the first call, and again after it had to be killed."""

    def __init__(self) -> None:
        self._child = Child("-m", "tgen.chat.render_child")

    def render(
        self,
        template: ChatTemplate,
        conversations: Sequence[Sequence[Message]],
        *,
        prompts: Sequence[bool] | None = None,
        tools: Sequence[Tools] | None = None,
        now: str | None = None,
    ) -> list[str]:
        """Return the text of each conversation, up to the start of the next answer.

        `prompts` says of each conversation whether that start is part of it, `tools` has the tools
        of each; `now` is the time in ISO format that the template sees instead of the current one.
        Raises RejectedMessagesError, FailedTemplateError, or ModelError if the template exceeds a
        limit.
        """
        request = {
            "source": template.source,
            "variables": template.variables,
            "conversations": conversations,
            "prompts": [True] * len(conversations) if prompts is None else prompts,
            "tools": [None] * len(conversations) if tools is None else tools,
            "now": now,
            "seconds": SECONDS,
            "bytes": BYTES,
        }
        try:
            response = self._child.ask(request, SECONDS, limit=_MAX_RESPONSE_BYTES)
        except (TimeoutError, EOFError) as error:
            is_slow = isinstance(error, TimeoutError)
            reason = f"took more than {SECONDS} s" if is_slow else "crashed its process"
            raise ModelError(f"the chat template {reason}", NO_CHAT_HINT) from None
        if "rejected" in response:
            raise RejectedMessagesError(response["rejected"], response["at"])
        if "failed" in response:
            raise FailedTemplateError(response["failed"], response["at"])
        return [str(text) for text in response["texts"]]
