"""The generation loop: requests in, Tokens out, with continuous batching.

A finished sequence is replaced at once; a new one reuses the KV cache of a shared prefix. When the
context is full, the window slides: its last half stays and is computed again. The start of a
window depends only on the number of tokens, so a continuation is the same whether the text before
it was generated or part of the prompt. A pass computes only a part of a long prompt, so that other
texts go on, and short prompts start, beside it.

With drafts, a pass also computes draft tokens. The sampler samples a token after each of them, and
samples are accepted up to the first that differs from the draft: the text is the same without
drafts.

A prompt cache holds an engine's keys and values for later requests; `tgen.checkpoint.prompt_cache`
reads and writes its files.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Protocol

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, PromptCache, common_prefix_length, reset
from tgen.errors import ModelError, UsageError
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.random_numbers import row_seed
from tgen.generation.sample import describe, most_likely
from tgen.generation.sequence import (
    Request,
    SequenceState,
    check_room,
    lacks_memory,
    sample_tokens,
    select_rows,
    window_start,
)
from tgen.generation.vocabulary import Vocabulary
from tgen.reports.generation import Token

_MAX_PROCESSORS = 1000  # cached for later requests
_PASS_TOKENS = 512  # limit of a pass, unless every prompt computes only its smallest part
_MIN_PROMPT_PART = 32  # tokens of a prompt per pass

# Returns the next request, or None: none is available now or, if the argument (whether the caller
# can wait) is True, none will follow.
RequestSource = Callable[[bool], Request | None]

# Takes the number of a request that cannot be continued, and the reason.
ErrorHandler = Callable[[int, Exception], None]


class Drafter(Protocol):
    """A source of draft tokens: n-grams, or another model."""

    def draft(self, states: Sequence[SequenceState], limits: Sequence[int]) -> list[list[int]]:
        """Return up to `limits[i]` draft tokens for each sequence of a pass."""

    def pause(self, state: SequenceState, /) -> int:
        """Return how many tokens will follow without drafts, at least 1, if there is none now."""

    def forget(self, sequences: Collection[int]) -> None:
        """Drop what is stored about finished sequences, by number."""


def make_source(requests: Iterable[Request]) -> RequestSource:
    """Make a source of requests that are known in advance."""
    remaining = iter(requests)
    return lambda _: next(remaining, None)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingConfig,
    stop: Collection[int] = (),
    kv_cache: bool = True,
    drafts: Drafter | None = None,
) -> Iterator[Token]:
    """Yield the Tokens that continue all prompts, until a `stop` token or the end by `sampling`.

    Prompt i uses the seed `row_seed(sampling.seed, i)`. See `generate_requests`.
    """
    requests = [
        Request(prompt, sampling.with_seed(row_seed(sampling.seed, i)))
        for i, prompt in enumerate(prompts)
    ]
    yield from generate_requests(
        engine,
        make_source(requests),
        batch_size=len(prompts),
        vocabulary=Vocabulary(ends=stop),
        kv_cache=kv_cache,
        drafts=drafts,
    )


def generate_requests(
    engine: Engine,
    source: RequestSource,
    *,
    batch_size: int,
    vocabulary: Vocabulary,
    kv_cache: bool = True,
    drafts: Drafter | None = None,
    prompt_cache: PromptCache | None = None,
    cancelled: Callable[[], Collection[int]] = tuple,
    on_error: ErrorHandler | None = None,
) -> Iterator[Token]:
    """Yield the Tokens of all requests, numbered in order from 0, up to `batch_size` at a time.

    Prompts must not be empty. A shared prefix of prompts is computed once, or taken from
    `prompt_cache` if no sequence is active. Without `kv_cache` the engine computes each window
    again for every token, without drafts. A request for no tokens yields none.

    `cancelled` is called before every pass: the sequences of the requests that it returns end
    without another Token; other numbers are ignored. If a request cannot be started or continued,
    its sequence ends and `on_error` is called; the other sequences are the same as without it.
    Without `on_error` the error is raised.
    """
    arrivals = _Arrivals(source, vocabulary, on_error)
    batch = _Batch(engine, drafts if kv_cache else None, on_error, kv_cache=kv_cache)
    while True:
        left = cancelled()
        arrivals.drop(left)
        batch.remove(left)
        new = arrivals.take(engine, batch.active, batch_size)
        if not batch.active and not new:
            return
        while new:
            try:
                batch.add(new, prompt_cache)
            except Exception as error:
                if not lacks_memory(error):
                    raise
                _report({new.pop().number: error}, on_error)  # the others may fit
            else:
                break
        if not batch.active:
            continue
        tokens, errors = batch.step(vocabulary)
        yield from tokens
        _report(errors, on_error)
        ended = {token.sequence for token in tokens if token.finish} | errors.keys()
        batch.remove(ended)


class _Arrivals:
    """The requests of a source, of which one may wait until the memory has room for its text."""

    def __init__(
        self, source: RequestSource, vocabulary: Vocabulary, on_error: ErrorHandler | None
    ) -> None:
        self._source, self._vocabulary, self._on_error = source, vocabulary, on_error
        self._make_processors = lru_cache(_MAX_PROCESSORS)(
            partial(LogitsProcessors, vocabulary=vocabulary)
        )
        self._n = 0  # requests so far
        self._waiting: SequenceState | None = None
        self._held: list[SequenceState] = []  # until a prefix that they can reuse is computed
        self._n_beside = 0  # active sequences beside which it did not fit

    def drop(self, numbers: Collection[int]) -> None:
        if self._waiting is not None and self._waiting.number in numbers:
            self._waiting = None
        self._held = [state for state in self._held if state.number not in numbers]

    def take(
        self, engine: Engine, active: Sequence[SequenceState], batch_size: int
    ) -> list[SequenceState]:
        """Return new sequences for which batch and memory have room beside the active ones."""
        new: list[SequenceState] = []
        if self._waiting is not None and len(active) >= self._n_beside:
            return new  # no text has ended since: to ask again before every pass takes time
        while len(active) + len(new) < batch_size:
            self._waiting = self._waiting or self._pop_held(engine, active)
            if self._waiting is None and len(active) + len(new) + len(self._held) < batch_size:
                self._waiting = self._next(engine, idle=not active and not new)
            if (state := self._waiting) is None:
                break
            if _is_being_computed(state, engine, active):
                self._held.append(state)
                self._waiting = None
                continue
            try:
                check_room(engine, [*active, *new, state])
                new.append(state)
            except ModelError as error:
                if active or new:
                    self._n_beside = len(active) + len(new)
                    break
                _report({state.number: error}, self._on_error)
            self._waiting = None
        return new

    def _pop_held(self, engine: Engine, active: Sequence[SequenceState]) -> SequenceState | None:
        for state in self._held:
            if not _is_being_computed(state, engine, active):
                self._held.remove(state)
                return state
        return None

    def _next(self, engine: Engine, *, idle: bool) -> SequenceState | None:
        while (request := self._source(idle)) is not None:
            number, sampling = self._n, request.sampling
            self._n += 1
            try:
                processors = self._make_processors(sampling)
                if sampling.max_new_tokens:
                    return SequenceState(
                        number, request, self._vocabulary, processors, engine.context_length
                    )
            except Exception as error:
                _report({number: error}, self._on_error)
        return None


def _report(errors: Mapping[int, Exception], on_error: ErrorHandler | None) -> None:
    for number, error in errors.items():
        if on_error is None:
            raise error
        on_error(number, error)


class _Batch:
    """The active sequences, each in a slot of the engine."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        on_error: ErrorHandler | None,
        *,
        kv_cache: bool,
    ) -> None:
        self._engine, self._drafter, self._on_error = engine, drafter, on_error
        self._kv_cache = kv_cache
        self.active: list[SequenceState] = []

    def remove(self, numbers: Collection[int]) -> None:
        """Remove sequences from the engine, and give samples that now differ their own slots."""
        left = [state for state in self.active if state.number not in numbers]
        has_removed = len(left) < len(self.active)
        if has_removed and self._drafter is not None:
            self._drafter.forget(numbers)
        self.active = left
        slots = [state.slot for state in left if state.has_started]
        if not has_removed and len(set(slots)) == len(slots):
            return
        try:
            self._compact()
        except Exception as error:
            if not lacks_memory(error):
                raise
            newest = max(state.number for state in left)
            _report({newest: error}, self._on_error)
            self.remove([newest])

    def add(self, new: list[SequenceState], cache: PromptCache | None) -> None:
        """Assign slots to new sequences, with the keys and values of known prefixes.

        Samples of one prompt share a slot until their first tokens differ.
        """
        engine = self._engine
        n_slots = len(engine.lengths) if self.active else 0
        prompts = [list(prompt) for prompt in dict.fromkeys(tuple(state.tokens) for state in new)]
        if n_slots:
            lengths, sources, shared = engine.lengths, [], []
            for prompt in prompts:
                n, _, slot = max(  # the shortest sequence with the longest prefix
                    (
                        _reusable_length(state, prompt, lengths, engine.context_length),
                        -lengths[state.slot],
                        state.slot,
                    )
                    for state in self.active
                )
                sources.append(slot)
                shared.append(n)
            engine.select([*range(n_slots), *sources], [*lengths, *shared])
        else:
            self._prefill_shared(prompts, cache)
            engine.select([0] * len(prompts))
        for state in new:
            state.slot = n_slots + prompts.index(state.tokens)
        self.active += new

    def _prefill_shared(self, prompts: list[list[int]], cache: PromptCache | None) -> None:
        """Reset the engine to one sequence: the prefix that all prompts share."""
        slides = max(map(len, prompts)) > self._engine.context_length
        if slides or not self._kv_cache:  # slid windows share nothing
            reset(self._engine, 1)
            return
        # Each prompt has at least one more token, whose logits are needed.
        n_shared = common_prefix_length(min(prompts), max(prompts))
        prefix = prompts[0][: min(n_shared, min(map(len, prompts)) - 1)]
        n = restore_prefix(self._engine, prefix, cache)
        if len(prompts) > 1 and n < len(prefix):
            self._engine.extend([prefix[n:]])

    def _compact(self) -> None:
        """Give every sequence its own slot from 0 on, in order, moving as few as possible; samples
        of one prompt share theirs until they differ."""
        groups: dict[int, list[SequenceState]] = {}
        for state in self.active:
            key = -1 - state.number if state.has_started else state.slot
            groups.setdefault(key, []).append(state)
        by_slot: dict[int, list[SequenceState]] = {}
        to_move = []
        for group in groups.values():
            if (slot := group[0].slot) < len(groups) and slot not in by_slot:
                by_slot[slot] = group
            else:
                to_move.append(group)
        free = [slot for slot in range(len(groups)) if slot not in by_slot]
        by_slot |= dict(zip(free, to_move, strict=True))
        ordered = [by_slot[slot] for slot in range(len(groups))]
        sources = [group[0].slot for group in ordered] or [0]  # its tokens may be used again
        if sources != list(range(len(self._engine.lengths))):
            self._engine.select(sources)
        for slot, group in enumerate(ordered):
            for state in group:
                state.slot = slot
        self.active = [state for group in ordered for state in group]

    def step(self, vocabulary: Vocabulary) -> tuple[list[Token], dict[int, Exception]]:
        """Run one pass; return the accepted tokens, and the errors of sequences by their number."""
        engine, active = self._engine, self.active
        first = {state.slot: state for state in reversed(active)}
        slots = [first[slot] for slot in range(len(first))]  # those in one slot are still equal
        new_tokens = self._rewind(slots)
        drafts: list[list[int]] = [[] for _ in slots]
        is_decoding = max(map(len, new_tokens)) == 1 and len(slots) == len(active)
        if self._drafter is not None and is_decoding:
            ends = (min(s.window_start + engine.context_length, s.max_length - 1) for s in slots)
            limits = [end - len(state.tokens) for end, state in zip(ends, slots, strict=True)]
            drafts = self._drafter.draft(slots, limits)
        can_continue = is_decoding and len(active) == 1 and not any(drafts)
        parts = _in_parts(new_tokens) if self._kv_cache else new_tokens
        if any(drafts):
            parts = [new + draft for new, draft in zip(new_tokens, drafts, strict=True)]
        try:
            if can_continue and (tokens := self._continue(active[0], vocabulary)):
                return tokens, {}
            logits = engine.extend(parts, every_position=any(drafts))
        except Exception as error:
            if not lacks_memory(error):
                raise
            return [], {max(state.number for state in active): error}  # the others may fit
        ready = [s for s in active if len(parts[s.slot]) >= len(new_tokens[s.slot])]
        return _accept(vocabulary.only_tokens(logits), ready, drafts)

    def _continue(self, state: SequenceState, vocabulary: Vocabulary) -> list[Token]:
        """Continue the only text by as many tokens as its engine computes at once; see
        `Engine.continue_text`."""
        engine, n_tokens = self._engine, len(state.tokens)
        if state.needs_logits or not vocabulary.has_all(engine.vocab_size) or not self._kv_cache:
            return []
        n = min(state.window_start + engine.context_length + 1, state.max_length) - n_tokens
        if self._drafter is not None:
            n = min(n, self._drafter.pause(state))
        sampled = engine.continue_text(state.tokens[-1], n, state.sampling, position=n_tokens)
        tokens: list[Token] = []
        for token in sampled:
            text, finish = state.append(token)
            complete = not finish or state.complete
            tokens.append(Token(state.number, token, text, [], finish, complete))
            if finish:
                break
        return tokens

    def _rewind(self, slots: list[SequenceState]) -> list[list[int]]:
        """Drop rejected drafts and slid windows (without KV cache, everything) from the engine;
        return the tokens that each sequence needs next."""
        lengths = self._engine.lengths
        for slot, state in enumerate(slots):
            start = window_start(len(state.tokens), self._engine.context_length)
            if start != state.window_start or not self._kv_cache:
                state.window_start, lengths[slot] = start, 0
            lengths[slot] = min(lengths[slot], len(state.tokens) - 1 - start)
        self._engine.rewind(lengths)
        return [s.tokens[s.window_start + n :] for s, n in zip(slots, lengths, strict=True)]


def _in_parts(new_tokens: list[list[int]]) -> list[list[int]]:
    """Return what a pass computes of the tokens of each sequence: at least one."""
    n_prompts = sum(len(new) > 1 for new in new_tokens)
    room = _PASS_TOKENS - (len(new_tokens) - n_prompts)
    size = max(_MIN_PROMPT_PART, room // max(1, n_prompts))
    return [new[:size] for new in new_tokens]


def _is_being_computed(
    state: SequenceState, engine: Engine, active: Sequence[SequenceState]
) -> bool:
    """Return whether more of a prompt than is cached now will be: a prefix of a long prompt that is
    computed in parts."""
    lengths = engine.lengths
    return any(
        common_prefix_length(state.tokens, other.tokens) - lengths[other.slot] >= _MIN_PROMPT_PART
        for other in active
        if not other.has_started and not other.window_start and not state.window_start
    )


def _reusable_length(
    state: SequenceState, prompt: list[int], lengths: Sequence[int], context_length: int
) -> int:
    """Return how many tokens of a prompt an active sequence has in the KV cache."""
    if state.window_start or len(prompt) > context_length:  # one of them has slid
        return 0
    # The last token is not cached yet, nor is the rest of a long prompt; drafts may follow.
    n_cached = min(lengths[state.slot], len(state.tokens) - 1)
    return min(common_prefix_length(prompt, state.tokens), n_cached)


def restore_prefix(engine: Engine, tokens: Sequence[int], cache: PromptCache | None) -> int:
    """Reset the engine to one sequence, the common prefix of `tokens` and the cache; return its
    length."""
    n = common_prefix_length(tokens, cache.tokens) if cache else 0
    if cache and n:
        engine.restore(cache.keys[:, :, :n], cache.values[:, :, :n])
    else:
        reset(engine, 1)
    return n


def _accept(
    logits: Logits, active: list[SequenceState], drafts: list[list[int]]
) -> tuple[list[Token], dict[int, Exception]]:
    """Sample a token for each sequence, and one more after each draft token that was right.

    Return the tokens, and the errors of sequences by their number.
    """
    expected = [token for draft in drafts for token in (*draft, None)]  # per row of the logits
    first_rows = list(accumulate((len(draft) + 1 for draft in drafts), initial=0))
    pending = [(state, first_rows[state.slot]) for state in active]  # and the row of the logits
    tokens: list[Token] = []
    to_describe: list[tuple[int, int, int]] = []  # a token's number, its row, its top log-probs
    errors: dict[int, Exception] = {}
    while pending:
        confirmed = []
        samples = sample_tokens(logits, pending, errors)
        for state, row in pending:
            if state.number in errors:
                continue
            token, removed = samples[state.number]
            try:
                text, finish = state.append(token)
            except Exception as error:
                errors[state.number] = error
                continue
            if state.described:
                to_describe.append((len(tokens), row, state.sampling.logprobs))
            complete = not finish or state.complete
            tokens.append(Token(state.number, token, text, removed, finish, complete))
            if token == expected[row] and not finish:
                confirmed.append((state, row + 1))
        pending = confirmed
    if to_describe:
        _describe(logits, tokens, to_describe)
    return tokens, errors


def _describe(logits: Logits, tokens: list[Token], numbers: Sequence[tuple[int, int, int]]) -> None:
    """Add what was requested to some tokens: their number, their row of the logits, and how many of
    the most likely ones."""
    ids = [tokens[i].id for i, _, _ in numbers]
    descriptions = describe(select_rows(logits, [row for _, row, _ in numbers]), ids)
    for (i, row, n_top), (logprob, rank, entropy) in zip(numbers, descriptions, strict=True):
        top = most_likely(logits[row], n_top, tokens[i].id, logprob)
        tokens[i] = tokens[i]._replace(
            logprob=logprob, rank=rank, entropy=entropy, top_logprobs=top
        )


def extract_prompt_cache(engine: Engine, tokens: Sequence[int]) -> PromptCache | None:
    """Return the keys and values of a text that the engine has just generated as its only sequence,
    or None if the window has slid."""
    n = engine.lengths[0]
    if len(tokens) > engine.context_length or not n:
        return None
    n = min(n, len(tokens) - 1)
    keys, values = engine.keys_and_values()
    return PromptCache(list(tokens[:n]), keys[:, :, :n], values[:, :, :n])


def compute_prompt_cache(
    engine: Engine, prompt: Sequence[int], known: PromptCache | None
) -> PromptCache:
    """Compute the keys and values of a prompt, reusing its prefix in `known`.

    Raises UsageError if the prompt is longer than the context, since its window would slide.
    """
    if len(prompt) > engine.context_length:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens cannot be cached "
            f"(context length {engine.context_length})",
            "shorten the prompt",
        )
    n = restore_prefix(engine, prompt, known)
    if len(prompt) > n:
        engine.extend([prompt[n:]])
    return PromptCache(list(prompt), *engine.keys_and_values())
