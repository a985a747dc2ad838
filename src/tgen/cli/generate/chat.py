"""`tgen generate` at a terminal: a chat with the model, or a text continued by each line typed."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tgen.cli import console
from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.reports.generation import Token

if TYPE_CHECKING:
    from tgen.chat.render import Message
    from tgen.engine.base import PromptCache
    from tgen.loaded_model import Decoding, LoadedModel


_PROMPT = "> "
_MIN_COLUMNS = 10  # GNU readline divides by zero in a terminal of 3


def require_terminal() -> None:
    """Raise UsageError unless stdin and stdout are a terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        hint = "remove --interactive, and pipe text in or pass --prompt"
        raise UsageError("--interactive needs a terminal", hint)


def repl(
    model: "LoadedModel", sampling: SamplingConfig, prompt: bytes, decoding: "Decoding"
) -> None:
    """Read lines until the end of input. Ctrl-C stops a text, Ctrl-D on an empty line ends."""
    from tgen.generation.random_numbers import row_seed

    console.print_status(
        "Ctrl-C stops a text, Ctrl-D ends the session; an empty line continues the text"
    )
    ids: list[int] = model.tokenizer.encode_prompt(prompt) if prompt else []
    cache: PromptCache | None = None
    n_turns = 0
    if prompt:
        console.write(prompt)
    while (line := b"" if prompt and not n_turns else read_line()) is not None:
        tokenizer = model.tokenizer
        encode = partial(tokenizer.encode, continuation=True) if ids else tokenizer.encode_prompt
        try:
            ids = ids + encode(line)
        except UsageError as error:  # a byte that the tokenizer cannot express
            console.print_status(f"error: {error.message}")
            continue
        config = replace(sampling, seed=row_seed(sampling.seed, n_turns))
        n_turns += 1
        try:
            ids = ids or model.encode(b"")
            cached = replace(decoding, prompt_cache=cache)
            tokens = model.tokens([ids], sampling=config, decoding=cached)
            turn = write_turn(model, ids, tokens)
            # After an end-of-text token, a new text starts.
            ids, cache = ([], None) if turn.end_of_text else (turn.ids, turn.cache)
        except UsageError as error:  # for example --overflow stop with a full context
            console.print_status(f"error: {error.message}")
            console.print_status("starting a new text")
            ids, cache = [], None


def read_line() -> bytes | None:
    """Return the typed line; None at the end of input."""
    _import_readline()
    while True:
        try:
            return os.fsencode(input(_PROMPT))
        except EOFError:
            console.write(b"\n")
            return None
        except KeyboardInterrupt:  # discards the line, as shells do
            console.write(b"\n")


def _import_readline() -> None:
    """Turn on line editing, except where GNU readline crashes at Ctrl-C."""
    try:
        columns = os.get_terminal_size().columns
    except OSError:
        columns = 0
    if os.environ.get("TERM", "dumb") == "dumb" or 0 < columns < _MIN_COLUMNS:
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing)


class Turn(NamedTuple):
    """The text that the model generated."""

    ids: list[int]  # the whole text so far
    text: bytes
    end_of_text: bool
    cache: "PromptCache | None"  # KV cache of `ids`, if known


def write_turn(model: "LoadedModel", ids: Sequence[int], tokens: Iterable[Token]) -> Turn:
    """Write a text as it is generated; Ctrl-C stops it."""
    from tgen.generation.loop import extract_prompt_cache

    all_ids, end_of_text, complete, text = list(ids), False, True, b""
    cache: PromptCache | None = None  # after Ctrl-C the engine's state is unknown
    try:
        for token, piece in model.pieces(tokens):
            all_ids.append(token.id)
            end_of_text, complete = token.id in model.bundle.end_ids, token.complete
            if piece:
                console.write(piece)
                text += piece
        cache = extract_prompt_cache(model.engine, all_ids)
    except KeyboardInterrupt:
        pass
    finally:  # also before an error
        if not text.endswith(b"\n"):
            console.write(b"\n")
    if not complete:
        console.print_status("error: the text is incomplete: raise --max-new-tokens")
    return Turn(all_ids, text, end_of_text, cache)


def message(role: str, content: bytes) -> "Message":
    """Return one message of a conversation."""
    return {"role": role, "content": content.decode("utf-8", "surrogateescape")}


def chat_loop(
    model: "LoadedModel",
    sampling: SamplingConfig,
    prompt: bytes,
    decoding: "Decoding",
    *,
    messages: "list[Message]",
) -> None:
    """Read lines as in `repl`; each line and each answer is a message."""
    from tgen.generation.loop import make_source
    from tgen.generation.random_numbers import row_seed

    console.print_status("Ctrl-C stops an answer, Ctrl-D ends the chat")
    conversation, n_turns = list(messages), 0
    cache: PromptCache | None = None
    while (line := prompt if prompt and not n_turns else read_line()) is not None:
        if not line:
            continue
        config = replace(sampling, seed=row_seed(sampling.seed, n_turns))
        n_turns += 1
        conversation.append(message("user", line))
        try:
            request = model.chat_request(conversation, config)
            source, cached = make_source([request]), replace(decoding, prompt_cache=cache)
            tokens = model.complete(source, batch_size=1, decoding=cached)
            turn = write_turn(model, request.prompt, tokens)
            conversation.append(message("assistant", turn.text))
            cache = turn.cache
        except UsageError as error:  # for example --overflow stop with a full context
            console.print_status(f"error: {error.message}")
            console.print_status("starting a new conversation")
            conversation, cache = list(messages), None
