"""Renders chat templates where it can be ended: in a process with bounded time and memory."""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tgen.chat.template import ChatTemplate
from tgen.errors import ModelError, UsageError

Message = dict[str, str]  # role, content
SECONDS, BYTES = 5, 512 << 20  # for a text; memory only where the platform can bound it
_LINE = 64 << 20  # of an answer, in bytes
_REMEDY = "leave --chat away: the text is then continued as it is"


class Sandbox:
    """One process, begun when it is first needed and again after it had to be ended."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def render(
        self, template: ChatTemplate, conversations: Sequence[Sequence[Message]]
    ) -> list[str]:
        """What the template makes of each conversation.

        Raises UsageError where the template refuses the messages, ModelError if it fails or takes
        too much.
        """
        asked = {
            "source": template.source,
            "variables": template.variables,
            "conversations": conversations,
            "seconds": SECONDS,
            "bytes": BYTES,
        }
        found = self._answer(json.dumps(asked).encode() + b"\n")
        if "refused" in found:
            raise UsageError(
                f"the chat template refuses the messages: {found['refused']}",
                "leave --system away, or change the messages",
            )
        if "failed" in found:
            raise ModelError(f"the chat template fails: {found['failed']}", _REMEDY)
        return [str(text) for text in found["texts"]]

    def _answer(self, line: bytes) -> dict[str, Any]:
        child = self._child if self._child and self._child.poll() is None else self._begin()
        assert child.stdin
        assert child.stdout
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        clock = threading.Timer(SECONDS, stop)
        clock.start()
        try:
            child.stdin.write(line)
            child.stdin.flush()
            found = json.loads(child.stdout.readline(_LINE))
        except (OSError, ValueError):  # it has been ended, or has ended itself
            _end(child)
            what = (
                f"takes more than {SECONDS} s"
                if late.is_set()
                else "ended the process that runs it"
            )
            raise ModelError(f"the chat template {what}", _REMEDY) from None
        except BaseException:  # Ctrl-C: its answer would be taken for the next one's
            _end(child)
            raise
        finally:
            clock.cancel()
            clock.join()
            if late.is_set():  # perhaps just after the answer
                _end(child)
        return dict(found)

    def _begin(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            # -P: not from whatever folder this happens to be.
            [sys.executable, "-P", "-m", "tgen.chat.render"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _end, self._child)
        return self._child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()
