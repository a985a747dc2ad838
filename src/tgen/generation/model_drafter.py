"""Draft tokens from a smaller model, for speculative decoding.

The draft model continues each text with the text's own settings and random numbers, so that at any
temperature a draft token is often the one that the model itself samples. It has a KV cache of its
own, which keeps the draft tokens that were right. The number of draft tokens follows from how many
of a text's were right before, and from what they cost; without enough success there are none.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tgen.engine.base import Engine, common_prefix_length, reset
from tgen.generation.ngram_drafter import cost_per_token
from tgen.generation.sequence import SequenceState, check_room, lacks_memory, sample_tokens
from tgen.generation.vocabulary import Vocabulary

_MAX_DRAFT = 8  # tokens
_MEMORY = 64  # draft tokens after which older ones count half
_FIRST_RATE = 0.7  # acceptance rate of a text, before any were tried
_RETRY = 32  # passes without draft tokens, after which one is tried


@dataclass
class _Text:
    """A text as the draft model knows it."""

    start: int = 0  # of the window
    n_read: int = 0  # tokens when the last draft was made
    n_cached: int = 0  # tokens of the window in the draft model's KV cache that are right
    draft: list[int] = field(default_factory=list)
    n_tried: float = 2.0
    n_accepted: float = 2 * _FIRST_RATE
    n_idle: int = 0  # passes without a draft

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the last draft with the tokens that came."""
        new = tokens[self.n_read :]
        n_right = common_prefix_length(self.draft, new)
        # The last draft token was sampled, but not computed.
        self.n_cached += min(n_right, max(len(self.draft) - 1, 0))
        if self.n_tried >= _MEMORY:
            self.n_tried, self.n_accepted = self.n_tried / 2, self.n_accepted / 2
        self.n_tried += min(n_right + 1, len(self.draft), len(new))
        self.n_accepted += n_right
        self.draft = []

    def best_length(self, cost: float) -> int:
        """Return the number of draft tokens with most tokens per time, if each costs `cost`."""
        rate, expected, speeds = self.n_accepted / self.n_tried, 1.0, [1.0]
        for n in range(1, _MAX_DRAFT + 1):
            expected += rate**n
            speeds.append(expected / (1 + n * cost))
        best = speeds.index(max(speeds))
        self.n_idle = 0 if best else self.n_idle + 1
        return best or int(self.n_idle % _RETRY == 0 and cost < 1)


class ModelDrafter:
    """A source of drafts by another model with the same vocabulary; see `loop.Drafter`.

    `LoadedModel.draft_with` checks that it has the same vocabulary, and is smaller.
    """

    def __init__(self, engine: Engine, vocabulary: Vocabulary, *, relative_cost: float) -> None:
        """`relative_cost` is the time of a pass, relative to that of the model itself."""
        self._engine, self._vocabulary, self._cost = engine, vocabulary, relative_cost
        self._texts: dict[int, _Text] = {}  # by number of the sequence
        self._slots: list[int] = []  # the sequences in the engine
        self._failed = False

    def draft(self, states: Sequence[SequenceState], limits: Sequence[int]) -> list[list[int]]:
        """Return drafts; none for a text that the draft model's context has no room for."""
        drafts: list[list[int]] = [[] for _ in states]
        if self._failed:
            return drafts
        cost = self._cost + cost_per_token(len(states))
        counts = []
        for state, limit in zip(states, limits, strict=True):
            text = self._texts.setdefault(state.number, _Text())
            text.learn(state.tokens)
            counts.append(min(text.best_length(cost), limit))
        longest = self._engine.context_length - _MAX_DRAFT
        room = [len(state.tokens) - state.window_start <= longest for state in states]
        n = max((n for n, fits in zip(counts, room, strict=True) if fits), default=0)
        if n < 1:
            return drafts
        try:
            made = self._run([s for s, fits in zip(states, room, strict=True) if fits], n)
        except Exception as error:  # the texts go on without drafts
            if not lacks_memory(error):
                raise
            self._failed = True
            reset(self._engine, 1)
            return drafts
        return [made.get(state.number, [])[:n] for state, n in zip(states, counts, strict=True)]

    def pause(self, _: SequenceState, /) -> int:
        """See `loop.Drafter`."""
        return 1

    def forget(self, sequences: Collection[int]) -> None:
        """Drop what is stored about finished sequences."""
        for number in sequences:
            self._texts.pop(number, None)

    def _run(self, states: Sequence[SequenceState], n: int) -> dict[int, list[int]]:
        """Draft `n` tokens for each sequence, fewer for one that ends; return them by number."""
        new = self._read(states)
        drafts = {state.number: self._texts[state.number].draft for state in states}
        pending = [(state.fork(), slot) for slot, state in enumerate(states)]
        for _ in range(n):
            logits = self._vocabulary.only_tokens(self._engine.extend(new))
            errors: dict[int, Exception] = {}  # which the model itself will meet, too
            samples = sample_tokens(logits, pending, errors)
            new, going = [tokens[-1:] for tokens in new], []
            for fork, slot in pending:
                if fork.number in errors:
                    continue
                token = samples[fork.number][0]
                drafts[fork.number].append(token)
                new[slot] = [token]
                if not fork.append(token)[1]:
                    going.append((fork, slot))
            if not (pending := going):
                break
        return drafts

    def _read(self, states: Sequence[SequenceState]) -> list[list[int]]:
        """Give each sequence a slot of the engine; return the tokens that its cache lacks."""
        slots = {number: slot for slot, number in enumerate(self._slots)}
        numbers = [state.number for state in states]
        new, lengths = [], []
        for state in states:
            text = self._texts[state.number]
            if state.number not in slots or text.start != state.window_start:
                text.start, text.n_cached = state.window_start, 0
            n = len(state.tokens) - text.start
            lengths.append(min(text.n_cached, n - 1))  # the last token gives the first logits
            new.append(state.tokens[text.start + lengths[-1] :])
            text.n_read, text.n_cached = len(state.tokens), n
        if numbers == self._slots:
            self._engine.rewind(lengths)
        else:
            self._engine.select([slots.get(number, 0) for number in numbers], lengths)
            check_room(self._engine, states)
            self._slots = numbers
        return new
