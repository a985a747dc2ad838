"""Render chat templates, which are untrusted code, in a process with time and memory limits."""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tgen.checkpoint.chat_template import ChatTemplate
from tgen.checkpoint.hf.tokenizer_config import NO_CHAT_HINT
from tgen.errors import ModelError, UsageError

Message = dict[str, str]  # role, content
SECONDS, BYTES = 5, 512 << 20  # limits per text; memory only where the platform supports it
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
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # one request at a time

    def render(
        self,
        template: ChatTemplate,
        conversations: Sequence[Sequence[Message]],
        *,
        prompts: Sequence[bool] | None = None,
        now: str | None = None,
    ) -> list[str]:
        """Return the text of each conversation, up to the start of the next answer.

        `prompts` says of each conversation whether that start is part of it; `now` is the time in
        ISO format that the template sees instead of the current one. Raises RejectedMessagesError,
        FailedTemplateError, or ModelError if the template exceeds a limit.
        """
        request = {
            "source": template.source,
            "variables": template.variables,
            "conversations": conversations,
            "prompts": [True] * len(conversations) if prompts is None else prompts,
            "now": now,
            "seconds": SECONDS,
            "bytes": BYTES,
        }
        with self._lock:
            response = self._send(json.dumps(request).encode() + b"\n")
        if "rejected" in response:
            raise RejectedMessagesError(response["rejected"], response["at"])
        if "failed" in response:
            raise FailedTemplateError(response["failed"], response["at"])
        return [str(text) for text in response["texts"]]

    def _send(self, line: bytes) -> dict[str, Any]:
        child = self._child if self._child and self._child.poll() is None else self._start()
        assert child.stdin
        assert child.stdout
        timed_out = threading.Event()

        def kill() -> None:
            timed_out.set()
            child.kill()

        timer = threading.Timer(SECONDS, kill)
        timer.start()
        try:
            child.stdin.write(line)
            child.stdin.flush()
            response = json.loads(child.stdout.readline(_MAX_RESPONSE_BYTES))
        except (OSError, ValueError):  # killed, or it exited
            _kill(child)
            reason = f"took more than {SECONDS} s" if timed_out.is_set() else "crashed its process"
            raise ModelError(f"the chat template {reason}", NO_CHAT_HINT) from None
        except BaseException:  # Ctrl-C: the next call must not read this response
            _kill(child)
            raise
        finally:
            timer.cancel()
            timer.join()
            if timed_out.is_set():  # perhaps just after the response
                _kill(child)
        return dict(response)

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            # -P: do not import from the current directory.
            [sys.executable, "-P", "-m", "tgen.chat.render_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _kill, self._child)
        return self._child


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()
