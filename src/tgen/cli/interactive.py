"""`tgen generate --interactive`: line after line at a terminal, each after all before it."""

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tgen.cli import console
from tgen.config import Draft, SamplingConfig
from tgen.errors import UsageError
from tgen.reports import Token

if TYPE_CHECKING:
    from tgen.api import Model
    from tgen.engine.base import PromptCache

_PROMPT = "> "


def require_terminal() -> None:
    """Raises UsageError where nobody can type."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        raise UsageError(
            "--interactive needs a terminal", "leave it away, and pipe the text in or give --prompt"
        )


def converse(
    model: "Model", sampling: SamplingConfig, text: bytes, *, kv_cache: bool, draft: Draft
) -> None:
    """Asks for lines until there are no more. Ctrl-C stops a text, Ctrl-D at a new line ends."""
    from tgen.generation.draw import row_seed

    with contextlib.suppress(ImportError):  # line editing and history, where there is readline
        import readline  # noqa: F401
    console.note("Ctrl-C stops a text, Ctrl-D ends; an empty line goes on")
    ids: list[int] = model.tokenizer.encode_prompt(text) if text else []
    cache: PromptCache | None = None
    turn = 0
    if text:
        console.write(text)
    while (line := b"" if text and not turn else _line()) is not None:
        tokenizer = model.tokenizer
        more = tokenizer.encode(line, continues=True) if ids else tokenizer.encode_prompt(line)
        ids = ids + more
        config = replace(sampling, seed=row_seed(sampling.seed, turn))
        turn += 1
        try:
            ids = ids or model.encode(b"")
            tokens = model.tokens(
                [ids], sampling=config, kv_cache=kv_cache, draft=draft, prompt_cache=cache
            )
            ids, cache = _turn(model, ids, tokens)
        except UsageError as error:  # for example --overflow stop, and the context is full
            console.note(f"error: {error.message}")
            console.note("a new text begins")
            ids, cache = [], None


def _line() -> bytes | None:
    """What was typed; None at the end of input."""
    while True:
        try:
            return os.fsencode(input(_PROMPT))
        except EOFError:
            console.write(b"\n")
            return None
        except KeyboardInterrupt:  # forgets the line, as shells do
            console.write(b"\n")


def _turn(
    model: "Model", ids: list[int], tokens: Iterable[Token]
) -> tuple[list[int], "PromptCache | None"]:
    """Writes a text; all ids so far, and what need not be computed again."""
    text, ended, complete, last = list(ids), False, True, b""
    cache: PromptCache | None = None  # after Ctrl-C nobody knows what the engine holds
    try:
        for token, piece in model.pieces(tokens):
            text.append(token.id)
            ended, complete = token.id in model.bundle.end_ids, token.complete
            if piece:
                console.write(piece)
                last = piece
        cache = model.kept(text)
    except KeyboardInterrupt:
        pass
    if not last.endswith(b"\n"):
        console.write(b"\n")
    if not complete:
        console.note("error: the text is incomplete: give more with -n")
    # After the end of a text another one begins.
    return ([], None) if ended else (text, cache)
