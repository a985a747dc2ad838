"""`tgen generate --interactive`: line after line at a terminal, each after all before it."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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


def repl(
    model: "Model", sampling: SamplingConfig, text: bytes, *, kv_cache: bool, draft: Draft
) -> None:
    """Asks for lines until there are no more. Ctrl-C stops a text, Ctrl-D at a new line ends."""
    from tgen.generation.sampling import row_seed

    print_help("Ctrl-C stops a text, Ctrl-D ends; an empty line goes on")
    ids: list[int] = model.tokenizer.encode_prompt(text) if text else []
    cache: PromptCache | None = None
    n_turns = 0
    if text:
        console.write(text)
    while (line := b"" if text and not n_turns else read_line()) is not None:
        tokenizer = model.tokenizer
        more = tokenizer.encode(line, continues=True) if ids else tokenizer.encode_prompt(line)
        ids = ids + more
        config = replace(sampling, seed=row_seed(sampling.seed, n_turns))
        n_turns += 1
        try:
            ids = ids or model.encode(b"")
            tokens = model.tokens(
                [ids], sampling=config, kv_cache=kv_cache, draft=draft, prompt_cache=cache
            )
            turn = write_turn(model, ids, tokens)
            # After the end of a text another one begins.
            ids, cache = ([], None) if turn.ended else (turn.ids, turn.cache)
        except UsageError as error:  # for example --overflow stop, and the context is full
            console.print_status(f"error: {error.message}")
            console.print_status("a new text begins")
            ids, cache = [], None


def print_help(told: str) -> None:
    """Says how it is used; lines can be edited where there is readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    console.print_status(told)


def read_line() -> bytes | None:
    """What was typed; None at the end of input."""
    while True:
        try:
            return os.fsencode(input(_PROMPT))
        except EOFError:
            console.write(b"\n")
            return None
        except KeyboardInterrupt:  # forgets the line, as shells do
            console.write(b"\n")


class Turn(NamedTuple):
    """What the model has written."""

    ids: list[int]  # all so far
    said: bytes
    ended: bool  # it came to the end of a text
    cache: "PromptCache | None"  # what need not be computed again


def write_turn(model: "Model", ids: Sequence[int], tokens: Iterable[Token]) -> Turn:
    """Writes a text as it comes; Ctrl-C stops it."""
    from tgen.generation.prompt_cache import kept

    text, ended, complete, said = list(ids), False, True, b""
    cache: PromptCache | None = None  # after Ctrl-C nobody knows what the engine holds
    try:
        for token, piece in model.pieces(tokens):
            text.append(token.id)
            ended, complete = token.id in model.bundle.end_ids, token.complete
            if piece:
                console.write(piece)
                said += piece
        cache = kept(model.engine, text)
    except KeyboardInterrupt:
        pass
    if not said.endswith(b"\n"):
        console.write(b"\n")
    if not complete:
        console.print_status("error: the text is incomplete: give more with -n")
    return Turn(text, said, ended, cache)
