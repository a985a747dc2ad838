"""`tgen generate` at a terminal: a chat with the model, or a text continued by each line typed."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tgen.cli import console
from tgen.config import SamplingConfig
from tgen.errors import TgenError, UsageError
from tgen.reports.generation import Token

if TYPE_CHECKING:
    from tgen.chat.render import Message
    from tgen.cli.generate.chat_commands import Settings
    from tgen.engine.base import PromptCache
    from tgen.loaded_model import Decoding, LoadedModel


_PROMPT = "> "
_MIN_COLUMNS = 10  # GNU readline divides by zero in a terminal of 3


def require_terminal() -> None:
    """Raise UsageError unless stdin and stdout are a terminal."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        hint = "remove --interactive, and pipe text in or pass --prompt"
        raise UsageError("--interactive needs a terminal", hint)


class Turn(NamedTuple):
    """A typed line, and the text that the model generated after it."""

    line: bytes
    before: list[Any]  # the session's ids or messages
    first_seed: int
    n_turns: int  # before this one, since the seed was set
    ids: list[int]  # the whole text so far
    tokens: list[Token]


class Session:
    """A text, or a chat, with its turns; commands change them."""

    def __init__(
        self,
        model: "LoadedModel",
        settings: "Settings",
        decoding: "Decoding",
        messages: "list[Message] | None" = None,
    ) -> None:
        """`messages` are those at the start of a chat; None: a text."""
        self.model, self.settings = model, settings
        self._start, self._decoding = messages, decoding
        self.turns: list[Turn] = []
        self._state: list[Any] = list(messages or ())  # messages, or the ids of the text
        self._cache: PromptCache | None = None

    def run(self, prompt: bytes) -> None:
        """Answer the prompt, if any, and read lines until the end of input.

        Ctrl-C stops a text, Ctrl-D on an empty line ends.
        """
        from tgen.cli.generate.chat_commands import run_command

        stops = "a text" if self._start is None else "an answer"
        continues = "; an empty line continues the text" if self._start is None else ""
        console.print_line(f"Ctrl-C stops {stops}, Ctrl-D ends the session{continues}")
        console.print_line("/help lists the commands")
        if prompt:
            if self._start is None:
                console.write(prompt)
            self.answer(prompt)
        while (line := read_line()) is not None:
            if line.startswith(b"/") and not line.startswith(b"//"):
                try:
                    run_command(self, line)
                except TgenError as error:
                    console.print_error(error.message, error.hint)
                except KeyboardInterrupt:
                    console.print_line("stopped")
            elif line or self._start is None:
                self.answer(line.removeprefix(b"/"))

    def answer(self, line: bytes) -> None:
        """Generate and write the text after a line."""
        from tgen.generation.loop import make_source

        model, before, settings = self.model, self._state, self.settings
        try:
            state = self._extend(line)
        except UsageError as error:  # a byte that the tokenizer cannot express
            console.print_line(f"error: {error.message}")
            return
        first_seed, n_turns = settings.first_seed, settings.n_turns
        sampling = settings.next_turn()
        try:
            if self._start is None:
                request = model.request(state or model.encode(b""), sampling)
            else:
                request = model.chat_request(state, sampling)
            decoding = replace(self._decoding, prompt_cache=self._cache)
            tokens = model.complete(make_source([request]), batch_size=1, decoding=decoding)
            answer = write_answer(model, request.prompt, tokens)
        except UsageError as error:  # for example --overflow stop with a full context
            console.print_line(f"error: {error.message}")
            self.clear()
            return
        self._cache = answer.cache
        self.turns.append(Turn(line, before, first_seed, n_turns, answer.ids, answer.tokens))
        if self._start is not None:
            self._state = [*state, message("assistant", answer.text)]
        else:  # after an end-of-text token, a new text starts
            self._state = [] if answer.end_of_text else answer.ids

    def _extend(self, line: bytes) -> list[Any]:
        if self._start is not None:
            return [*self._state, message("user", line)]
        tokenizer = self.model.tokenizer
        if not self._state:
            return tokenizer.encode_prompt(line)
        return self._state + tokenizer.encode(line, continuation=True)

    def clear(self) -> None:
        """Start a new text or conversation."""
        kind = "text" if self._start is None else "conversation"
        console.print_line(f"starting a new {kind}")
        self.turns, self._state = [], list(self._start or ())

    def undo(self) -> Turn:
        """Remove the last turn, and count the seeds as before it; return it."""
        if not self.turns:
            raise UsageError("no turn to remove or repeat", "type a line first")
        turn = self.turns.pop()
        self._state = turn.before  # the cache stays: its start is the cache of this text
        if turn.first_seed == self.settings.first_seed:
            self.settings.n_turns = turn.n_turns
        return turn

    def retry(self) -> None:
        """Generate the last turn again with the next seed."""
        n_turns = self.settings.n_turns
        turn = self.undo()
        self.settings.n_turns = n_turns
        console.print_line(f"seed {self.settings.seed}")
        self.answer(turn.line)

    def check(self, sampling: SamplingConfig) -> None:
        """Raise UsageError if no text can be sampled so."""
        self.model.request([0], sampling)

    @property
    def messages(self) -> "list[Message] | None":
        """The messages of a chat; None for a text."""
        return None if self._start is None else self._state

    @property
    def text(self) -> bytes:
        """The text of the turns, from the start of the last text on."""
        ids = self._state or (self.turns[-1].ids if self.turns else [])
        return b"".join(map(self.model.vocabulary.bytes_of, ids))


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


class Answer(NamedTuple):
    """The text that the model generated."""

    ids: list[int]  # the whole text so far
    text: bytes
    tokens: list[Token]
    end_of_text: bool
    cache: "PromptCache | None"  # KV cache of `ids`, if known


def write_answer(model: "LoadedModel", ids: Sequence[int], tokens: Iterable[Token]) -> Answer:
    """Write a text as it is generated; Ctrl-C stops it."""
    from tgen.generation.loop import extract_prompt_cache

    all_ids, new, complete, text = list(ids), list[Token](), True, b""
    cache: PromptCache | None = None  # after Ctrl-C the engine's state is unknown
    try:
        for token, piece in model.pieces(tokens):
            all_ids.append(token.id)
            new.append(token)
            complete = token.complete
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
        console.print_line("error: the text is incomplete: raise --max-new-tokens")
    end_of_text = bool(new) and new[-1].id in model.bundle.end_ids
    return Answer(all_ids, text, new, end_of_text, cache)


def message(role: str, content: bytes) -> "Message":
    """Return one message of a conversation."""
    return {"role": role, "content": content.decode("utf-8", "surrogateescape")}
