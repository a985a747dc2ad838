"""Errors for callers of `tgen.python_api`: they name keywords where the command line has flags."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tgen.config import EngineOptions, SamplingConfig
from tgen.config.input_files import Reading
from tgen.config.option import flag_values, replace_flags
from tgen.config.training import TrainConfig
from tgen.errors import TgenError


@cache
def _keywords() -> dict[str, Any]:
    """Return the keyword of each flag, as `flag_values` does."""
    from tgen.drawing.view_options import ViewOptions
    from tgen.runs import RunRequest

    named = {
        "--draft-model": "draft_model",
        "--model": "path",
        "--prompt": "text",
        "--save-cache": "save_cache",
        "--view": "view",
    }
    return {
        **flag_values(SamplingConfig, EngineOptions, TrainConfig, Reading, RunRequest, ViewOptions),
        **{flag: (name, ()) for flag, name in named.items()},
        **{f"--{name}": (name, None) for name in ("resume", "override", "tail")},
    }


def _spell(name: str, value: str) -> str:
    is_code = value.isupper() or value in ("True", "False") or re.fullmatch(r"[\d.]+|'.*'", value)
    return f"{name}={value}" if is_code else f'{name}="{value}"'


@contextmanager
def named_keywords() -> Iterator[None]:
    """Name keywords in errors where the command line has flags, and add hints to tracebacks."""
    try:
        yield
    except TgenError as error:
        error.message, error.hint = map(_without_flags, (error.message, error.hint))
        error.args = (error.message,)
        if error.hint and not getattr(error, "__notes__", None):
            error.add_note(f"hint: {error.hint}")
        raise


def _without_flags(text: str) -> str:
    if "torchrun --" in text:  # a command that has no other form
        return text
    plain = text.replace("continue a prompt without --chat", "call generate").replace("--set ", "")
    plain = replace_flags(plain, _keywords(), _spell)
    return re.sub(r"tgen train((?: \w+(?:=[^\s`]+)?)+)(?=`|$)", _as_call, plain)


def _as_call(options: re.Match[str]) -> str:
    words = [word if "=" in word else f"{word}=..." for word in options[1].split()]
    return f"tgen.train({', '.join(words)})"
