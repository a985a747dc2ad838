"""A chat with the model, or a text continued by each line typed: its turns, and what follows."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tgen.cli import console
from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.reports.generation import Token

if TYPE_CHECKING:
    from tgen.chat.render import Message
    from tgen.cli.generate.chat_settings import Settings
    from tgen.engine.base import PromptCache
    from tgen.loaded_model import Decoding, LoadedModel


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
        self.start, self._decoding = messages, decoding
        self.turns: list[Turn] = []
        self._state: list[Any] = list(messages or ())  # messages, or the ids of the text
        self._cache: PromptCache | None = None

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
            if self.start is None:
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
        if self.start is not None:
            self._state = [*state, message("assistant", answer.text)]
        else:  # after an end-of-text token, a new text starts
            self._state = [] if answer.end_of_text else answer.ids

    def _extend(self, line: bytes) -> list[Any]:
        if self.start is not None:
            return [*self._state, message("user", line)]
        tokenizer = self.model.tokenizer
        if not self._state:
            return tokenizer.encode_prompt(line)
        return self._state + tokenizer.encode(line, continuation=True)

    def clear(self) -> None:
        """Start a new text or conversation."""
        kind = "text" if self.start is None else "conversation"
        console.print_line(f"starting a new {kind}")
        self.turns, self._state = [], list(self.start or ())

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
        return None if self.start is None else self._state

    @property
    def text(self) -> bytes:
        """The text of the turns, from the start of the last text on."""
        ids = self._state or (self.turns[-1].ids if self.turns else [])
        return b"".join(map(self.model.vocabulary.bytes_of, ids))


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
