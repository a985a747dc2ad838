"""The prompt of a command: `--prompt`, or stdin."""

import os
import sys
from typing import Any

from tgen.config.option import option
from tgen.errors import UsageError


def prompt_option(help_text: str) -> Any:
    """Declare `--prompt`."""
    return option(None, help_text, "--prompt -p", metavar="TEXT", shown_default="read from stdin")


def read_prompt(prompt: str | None) -> bytes:
    """Return the prompt's bytes; stdin is read only without a prompt, or if it is '-'."""
    if prompt is not None and prompt != "-":
        return os.fsencode(prompt)
    if sys.stdin is None or (sys.stdin.isatty() and prompt is None):
        raise UsageError("no prompt", 'pass --prompt "TEXT", or pipe text in')
    return sys.stdin.buffer.read()
