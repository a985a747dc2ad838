"""A request and its sequence: what fits into the context window and which part of a longer text the
model sees; logits processing, the visible text, and its end.

Stop strings are matched on bytes, and text that may be the start of one is withheld.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import NamedTuple, Self

from tgen.config import SamplingConfig, raw
from tgen.config.sampling import Text
from tgen.engine.base import Engine, Logits
from tgen.errors import ModelError, UsageError, is_out_of_memory
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.required_strings import RequiredStrings, missing_strings
from tgen.generation.sample import sample
from tgen.generation.vocabulary import Vocabulary
from tgen.generation.words import TAIL_BYTES
from tgen.reports.generation import Finish, RemovedCandidates


class Request(NamedTuple):
    """A prompt to continue, and its sampling settings."""

    prompt: Sequence[int]  # at least one token
    sampling: SamplingConfig
    ends: frozenset[int] = frozenset()  # end tokens of this request besides the vocabulary's
    described: bool = True  # whether its tokens get log-probability, rank and entropy


def check_request(request: Request, vocabulary: Vocabulary, context_length: int) -> None:
    """Raise UsageError if the prompt or the required strings do not fit, or no text can match."""
    sampling, n_prompt = request.sampling, len(request.prompt)
    room = context_length + 1 - n_prompt
    slides, n_new = sampling.overflow == "slide", sampling.max_new_tokens
    if not slides and n_new and room < (n_new if sampling.overflow == "error" else 1):
        if room < 1:
            raise UsageError(
                f"the prompt has {n_prompt} tokens (context length {context_length})",
                "shorten the prompt, or add --overflow slide",
            )
        raise UsageError(
            f"prompt tokens ({n_prompt}) and new tokens ({n_new}) do not fit "
            f"(context length {context_length})",
            f"use -n {room} or less, or add --overflow slide",
        )
    ids = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": dict(sampling.logit_bias)}
    for name, given in ids.items():
        if (i := max(given, default=0)) >= vocabulary.size:
            message = f"{name}: invalid token id {i}, expected ids below {vocabulary.size:,}"
            raise UsageError(message, "tgen tokenize prints the ids of a text", field=name)
    if sampling.constrained:
        vocabulary.grammars.matcher(sampling)
    vocabulary.known_words(sampling)
    needed = 0
    if sampling.require:
        try:
            required = RequiredStrings(sampling, vocabulary)
            strings = missing_strings(required.strings, b"")
            needed = len(required.plan(end_of_prompt(request.prompt, vocabulary), strings))
        except UsageError as error:
            raise UsageError(f"require: {error.message}", error.hint, field="require") from None
    available = n_new if slides else min(n_new, room)
    if needed > available:
        raise UsageError(
            f"require: the strings have {needed} token{'s' * (needed != 1)}, but only {available} "
            "can be generated",
            f"use -n {needed} or more, and add --overflow slide",
            field="require",
        )


def named_tokens(stops: Iterable[Text], control_tokens: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of control tokens, which have no text, whose names are stop strings."""
    names = {raw(text).decode(errors="replace") for text in stops}
    return frozenset(control_tokens[name] for name in names & control_tokens.keys())


def end_of_prompt(prompt: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """Return the last bytes of a prompt; tokens without bytes separate texts."""
    end = b""
    for token in reversed(prompt):
        piece = vocabulary.bytes_of(token)
        end = piece + end
        if not piece or len(end) >= TAIL_BYTES:
            break
    return end


def window_start(n_tokens: int, context_length: int) -> int:
    """Return the first token inside the window after a text of `n_tokens` has slid."""
    if n_tokens <= context_length:
        return 0
    stride = default_stride(context_length)
    return stride * -(-(n_tokens - context_length) // stride)


def default_stride(context_length: int) -> int:
    """Return the number of tokens by which a window moves: half a context, at least 1."""
    return max(1, context_length - context_length // 2)


class StopStringMatcher:
    """A filter of a text, piece by piece, that lets no part of a stop string through."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = stops
        self._withheld = b""
        self.found: bytes | None = None  # the stop string that ended the text

    def feed(self, piece: bytes, *, may_end: bool = True) -> bytes:
        """Add a piece; return what can be shown now, nothing after a stop string. Without
        `may_end`, the text cannot end before this piece or in it."""
        if self.found is not None:
            return b""
        if not self._stops or not may_end:
            return self.flush() + piece
        text = self._withheld + piece
        # The stop string that ends first counts; of several, the one that starts first.
        matches = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._withheld = b""
            return text[:at]
        n = len(text) - max(_longest_start(stop, text) for stop in self._stops)
        self._withheld = text[n:]
        return text[:n]

    def flush(self) -> bytes:
        """Return the withheld bytes, at the end of a text without a stop string."""
        text, self._withheld = self._withheld, b""
        return text


def _longest_start(stop: bytes, text: bytes) -> int:
    """Return how many bytes at the end of `text` may be the start of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class SequenceState:
    """An active request. `slot` is its sequence in the engine; samples may share one at first."""

    def __init__(
        self,
        number: int,
        request: Request,
        vocabulary: Vocabulary,
        processors: LogitsProcessors,
        context_length: int,
    ) -> None:
        prompt, sampling, self._own_ends, self.described = request
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        self._ends = self._own_ends | set(sampling.stop_token_ids)
        self.number, self.sampling, self.slot = number, sampling, 0
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        self.max_length = self.prompt_length + sampling.max_new_tokens
        if sampling.overflow != "slide":  # a full context still predicts one more token
            self.max_length = min(self.max_length, context_length + 1)
        self.window_start = window_start(self.prompt_length, context_length)
        self.processors = processors  # one object for all requests that differ in the seed only
        before = end_of_prompt(prompt, vocabulary) if processors.reads_prompt else b""
        self._vocabulary, self._text_state = vocabulary, processors.new_text(before)
        self._no_candidates = False  # no token was allowed
        self._stop_strings, self._new_bytes = StopStringMatcher(sampling.stops), b""
        self._matcher = vocabulary.grammars.matcher(sampling) if sampling.constrained else None
        self._may_end = True  # whether a stop string can end the text in the next piece
        self.changes_logits = not processors.inactive or self._matcher is not None

    def fork(self) -> Self:
        """Return a copy that drafts can continue. It has no constraint: texts of one grammar share
        a limited memory, which drafts must not use up."""
        fork = copy(self)
        fork.tokens, fork._text_state = [*self.tokens], self._text_state.fork()
        fork._stop_strings, fork._matcher = copy(self._stop_strings), None
        fork.changes_logits = not self.processors.inactive
        return fork

    @property
    def has_started(self) -> bool:
        """Whether the sequence has a new token: samples of one prompt differ from here on."""
        return len(self.tokens) > self.prompt_length

    @property
    def complete(self) -> bool:
        """Whether the text satisfies its constraint and did not run out of allowed tokens."""
        has_stop_string = self._stop_strings.found is not None
        return not self._no_candidates and (has_stop_string or self._satisfies)

    @property
    def _satisfies(self) -> bool:
        return self._matcher is None or self._matcher.complete

    def process_logits(self, logits: Logits) -> None:
        """Apply processors and constraints to the logits (V,) of the next token, in place."""
        if not self.processors.inactive:
            n_left = self.max_length - len(self.tokens)
            self.processors.apply(
                logits,
                self.tokens,
                self.prompt_length,
                self._new_bytes,
                n_left,
                self._text_state,
                self._own_ends,
            )
        if self._matcher is not None:
            logits[~self._matcher.allowed(len(logits))] = -float("inf")
        if logits.max() == -float("inf"):  # end the text, complete or not
            self._no_candidates = True
            if not self._vocabulary.ends:
                raise UsageError("no token is allowed next", "relax --ban or the constraint")
            logits[sorted(self._vocabulary.ends)] = 0

    def choose(self, token: int, logits: Logits) -> int:
        """Return a sampled token, or instead one that completes the text within its limit; `logits`
        (V,) are those of `process_logits`."""
        if self._matcher is None:
            return token
        return self._matcher.choose(token, logits, self.max_length - len(self.tokens) - 1)

    @property
    def needs_logits(self) -> bool:
        """Whether more is done with logits than sampling."""
        return self.described or self.changes_logits or self.sampling.explain

    def append(self, token: int) -> tuple[bytes, Finish | None]:
        """Append a token; return the text that can be shown and why the sequence ends, if so."""
        self.tokens.append(token)
        piece = b"" if token in self._ends else self._vocabulary.bytes_of(token)
        if not self.processors.inactive:
            self._new_bytes += piece
        # A stop string does not cut a text that would then violate its constraint. Between the
        # bytes of a character, what was true before it holds.
        if not b"\x80" <= piece[:1] < b"\xc0":
            self._may_end = self._satisfies
        text = self._stop_strings.feed(piece, may_end=self._may_end)
        if self._matcher is not None:
            self._matcher.accept(token)
        finish = self._finish_reason(token)
        return text + (self._stop_strings.flush() if finish else b""), finish

    def _finish_reason(self, token: int) -> Finish | None:
        stopped = self._matcher is not None and self._matcher.stopped
        is_end = token in self._vocabulary.ends or token in self._ends
        if is_end or self._stop_strings.found is not None or stopped:
            return "stop"
        if len(self.tokens) - self.prompt_length == self.sampling.max_new_tokens:
            return "length"
        return "context" if len(self.tokens) == self.max_length else None


def check_room(engine: Engine, states: Sequence[SequenceState]) -> None:
    """Raise ModelError if the memory has no room for all texts, as long as they may become."""
    engine.check_room([min(state.max_length, engine.context_length) for state in states])


def lacks_memory(error: Exception) -> bool:
    """Return whether an engine failed because its texts do not fit the memory."""
    return isinstance(error, ModelError) or is_out_of_memory(error)


def select_rows(logits: Logits, rows: list[int]) -> Logits:
    """Return these rows of the logits, without a copy if they are all rows in order."""
    return logits if rows == list(range(len(logits))) else logits[rows]


def sample_tokens(
    logits: Logits, pending: Sequence[tuple[SequenceState, int]], errors: dict[int, Exception]
) -> dict[int, tuple[int, list[RemovedCandidates]]]:
    """Sample a token per sequence, together for sequences with equal settings; if that fails, each
    alone. Return tokens, and what the samplers removed before, by the sequences' numbers.

    The errors of sequences are added to `errors`.
    """
    groups: dict[LogitsProcessors, list[tuple[SequenceState, int]]] = {}
    for state, row in pending:
        groups.setdefault(state.processors, []).append((state, row))
    samples: dict[int, tuple[int, list[RemovedCandidates]]] = {}
    waiting = [*groups.values()]
    while waiting:
        group = waiting.pop()
        states = [state for state, _ in group]
        sampling = states[0].sampling
        removed: list[list[RemovedCandidates]] = [[] for _ in group]
        try:
            group_logits = select_rows(logits, [row for _, row in group])
            if any(state.changes_logits for state in states):
                group_logits = group_logits.copy()
                for state, row in zip(states, group_logits, strict=True):
                    state.process_logits(row)
            ids = sample(
                group_logits,
                sampling,
                seeds=[state.sampling.seed for state in states],
                positions=[len(state.tokens) for state in states],
                explanations=removed if sampling.explain else (),
            )
            if sampling.json_schema is not None or sampling.grammar is not None:
                ids = [
                    state.choose(token, row)
                    for state, token, row in zip(states, ids, group_logits, strict=True)
                ]
        except Exception as error:
            if len(group) > 1:
                waiting += [[one] for one in group]
            else:
                errors[states[0].number] = error
            continue
        for state, token, steps in zip(states, ids, removed, strict=True):
            samples[state.number] = token, steps
    return samples
