"""One text on its way: what it may say next, what of it can be shown, and where it ends."""

from collections.abc import Sequence
from typing import NamedTuple

from tgen.config import SamplingConfig, raw
from tgen.engine.base import Logits
from tgen.errors import UsageError
from tgen.generation.logits_processors import LogitsProcessors, missing
from tgen.generation.stop_strings import StopStringMatcher
from tgen.generation.token_bytes import Vocabulary
from tgen.reports import Finish


class Request(NamedTuple):
    """A text to be continued, and how."""

    prompt: Sequence[int]  # at least one token
    sampling: SamplingConfig
    ends: frozenset[int] = frozenset()  # tokens that end this text, beside those that end any


class SequenceState:
    """A request under way. `place` is its row in the engine, which samples may share at first."""

    def __init__(
        self,
        number: int,
        request: Request,
        vocabulary: Vocabulary,
        rules: LogitsProcessors,
        context: int,
    ) -> None:
        prompt, sampling, self._ends = request
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        self.number, self.sampling, self.place = number, sampling, 0
        self.text, self.prompt_length = list(prompt), len(prompt)
        self.longest = self.prompt_length + sampling.max_new_tokens
        if sampling.overflow != "slide":  # a full context still says what comes after it
            self.longest = min(self.longest, context + 1)
        self.start = window_start(self.prompt_length, context)  # the first token in sight
        self.rules = rules  # one object for all rows that differ in their seeds alone
        self._vocabulary = vocabulary
        self._stuck = False  # no token was left that may follow
        self._stopper, self._written = StopStringMatcher(sampling.stops), b""
        self._matcher = vocabulary.grammars.matcher(sampling) if sampling.constrained else None
        self.free = rules.idle and self._matcher is None  # logits are taken as the model gives them

    @property
    def n_new(self) -> int:
        """Tokens generated so far."""
        return len(self.text) - self.prompt_length

    @property
    def complete(self) -> bool:
        """Whether the text is of the form that it is to be of, and could go on as it is to."""
        return not self._stuck and (self._matcher is None or self._matcher.complete)

    def rule(self, logits: Logits) -> None:
        """Changes the logits (V,) of what follows."""
        if not self.rules.idle:
            n_left = self.longest - len(self.text)
            self.rules.apply(logits, self.text, self.prompt_length, self._written, n_left)
        if self._matcher is not None:
            logits[~self._matcher.allowed(len(logits))] = -float("inf")
        if logits.max() == -float("inf"):  # the text ends here, whether it may or not
            self._stuck = True
            if not self._vocabulary.ends:
                raise UsageError("no token is left that may follow", "ban or constrain less")
            logits[sorted(self._vocabulary.ends)] = 0

    def take(self, token: int) -> tuple[bytes, Finish | None]:
        """Goes on with a token: what can be shown, and why the text ends here, if it does."""
        self.text.append(token)
        piece = b"" if token in self._ends else self._vocabulary.bytes_of(token)
        if not self.rules.idle:
            self._written += piece
        shown = self._stopper.feed(piece)
        if self._matcher is not None:
            self._matcher.accept(token)
        finish = self._finish(token)
        return shown + (self._stopper.flush() if finish else b""), finish

    def _finish(self, token: int) -> Finish | None:
        over = self._matcher is not None and self._matcher.over
        ended = token in self._vocabulary.ends or token in self._ends
        if ended or self._stopper.found is not None or over:
            return "stop"
        if self.n_new == self.sampling.max_new_tokens:
            return "length"
        return "context" if len(self.text) == self.longest else None


def check_request(request: Request, vocabulary: Vocabulary, context: int) -> None:
    """Raises UsageError where a text cannot be as it is to be: its length, its form, its parts."""
    sampling = request.sampling
    _check_room(sampling, len(request.prompt), context)
    if sampling.constrained:
        vocabulary.grammars.matcher(sampling)
    required = missing([raw(text) for text in sampling.require], b"")
    needed, room = sum(len(vocabulary.encode(text)) for text in required), sampling.max_new_tokens
    if sampling.overflow != "slide":
        room = min(room, context + 1 - len(request.prompt))
    if needed > room:
        raise UsageError(
            f"what is required takes {needed} tokens, there is room for {room}",
            f"ask for at least {needed} with -n, and add --overflow slide",
        )


def _check_room(sampling: SamplingConfig, n_prompt: int, context: int) -> None:
    room = context + 1 - n_prompt
    needed = sampling.max_new_tokens if sampling.overflow == "error" else 1
    if sampling.overflow == "slide" or not sampling.max_new_tokens or room >= needed:
        return
    if room < 1:
        raise UsageError(
            f"the prompt has {n_prompt} tokens, the context {context}",
            "shorten the prompt, or add --overflow slide",
        )
    raise UsageError(
        f"{n_prompt} tokens of prompt and {needed} more do not fit into the context of {context}",
        f"ask for at most {room} with -n, or add --overflow slide",
    )


def window_start(n_tokens: int, context_length: int) -> int:
    """The first token still seen when a row of `n_tokens` has slid as often as it must."""
    if n_tokens <= context_length:
        return 0
    stride = max(1, context_length - context_length // 2)
    return stride * -(-(n_tokens - context_length) // stride)
