"""The generation loop: rows of prompts -> tokens, until each row ends.

Rows are computed together; where one ends, the next request takes its place. Past the context a row
slides: when full, its last half is kept and computed anew. Where a row's window starts depends on
its number of tokens alone, so a text goes on the same way whether its beginning was generated or
given.

With drafts a pass computes guesses too. The one sampler picks a token after each of them, and the
picks stand up to the first that is not what was guessed: without drafts the text is the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, PromptCache, common_prefix_length, reset
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.logprobs import Pick, at, reports
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.sampling import row_seed, sample
from tgen.generation.sequence import Request, SequenceState, window_start
from tgen.generation.token_bytes import Vocabulary
from tgen.reports import Removed, Token

_MOST_RULES = 1000  # kept for rows to come

# Gives the next request. None: there is none now, or, if the caller can wait, there is no more.
RequestSource = Callable[[bool], Request | None]


def in_turn(requests: Iterable[Request]) -> RequestSource:
    """Gives one after another of those that are known."""
    left = iter(requests)
    return lambda _: next(left, None)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingConfig,
    stop: Collection[int] = (),
    kv_cache: bool = True,
    drafts: NgramDrafter | None = None,
    prompt_cache: PromptCache | None = None,
) -> Iterator[Token]:
    """Yields the Tokens of all rows; a row ends with a token of `stop`, or as `sampling` says.

    Row i draws by `row_seed(sampling.seed, i)`. See `generate_rows`.
    """
    requests = [
        Request(prompt, replace(sampling, seed=row_seed(sampling.seed, row)))
        for row, prompt in enumerate(prompts)
    ]
    yield from generate_rows(
        engine,
        in_turn(requests),
        n_rows=len(prompts),
        vocabulary=Vocabulary(ends=stop),
        kv_cache=kv_cache,
        drafts=drafts,
        prompt_cache=prompt_cache,
    )


def generate_rows(
    engine: Engine,
    waiting: RequestSource,
    *,
    n_rows: int,
    vocabulary: Vocabulary,
    kv_cache: bool = True,
    drafts: NgramDrafter | None = None,
    prompt_cache: PromptCache | None = None,
) -> Iterator[Token]:
    """Yields the Tokens of all requests, `n_rows` at a time; a row is numbered as it comes.

    Prompts must not be empty. What they begin with is computed once where they share it, and taken
    from `prompt_cache` as far as it is there, while no row is under way. Without `kv_cache` the
    same engine computes each row's whole window again for every token, and nothing is guessed. A
    request for no tokens has none.
    """
    rules: dict[SamplingConfig, LogitsProcessors] = {}
    rows: list[SequenceState] = []
    number = 0
    while True:
        new: list[SequenceState] = []
        while len(rows) + len(new) < n_rows:
            request = waiting(not rows and not new)
            if request is None:
                break
            if len(rules) > _MOST_RULES:
                rules = {row.sampling: row.rules for row in (*rows, *new)}
            if request.sampling not in rules:
                rules[request.sampling] = LogitsProcessors(request.sampling, vocabulary)
            rule = rules[request.sampling]
            if request.sampling.max_new_tokens:
                new.append(SequenceState(number, request, vocabulary, rule, engine.context_length))
            number += 1
        if new:
            _admit(engine, rows, new, prompt_cache, kv_cache=kv_cache)
            rows += new
        if not rows:
            return
        picks, logits = _step(engine, rows, drafts if kv_cache else None, kv_cache=kv_cache)
        yield from reports(picks, logits)
        ended = {pick.row for pick in picks if pick.finish}
        if ended and drafts is not None:
            drafts.forget(ended)
        if ended or new:
            rows = _settle(engine, [row for row in rows if row.number not in ended])


def begin_with(engine: Engine, tokens: Sequence[int], cache: PromptCache | None) -> int:
    """Leaves one row with as many of the first tokens as the cache has; how many they are."""
    n = common_prefix_length(tokens, cache.tokens) if cache else 0
    if cache and n:
        engine.restore(cache.keys[:, :, :n], cache.values[:, :, :n])
    else:
        reset(engine, 1)
    return n


def _admit(
    engine: Engine,
    rows: list[SequenceState],
    new: list[SequenceState],
    cache: PromptCache | None,
    *,
    kv_cache: bool,
) -> None:
    """Gives new rows places in the engine, samples of one prompt a common one, with what can be had
    of their beginnings without computing it."""
    prompts = [list(prompt) for prompt in dict.fromkeys(tuple(row.text) for row in new)]
    n_old, places, held = len(rows), [], []
    if rows:
        before = engine.lengths
        for prompt in prompts:
            n, _, place = max(  # the shortest row of those that hold as much
                (_n_held(row, prompt, engine.context_length), -before[row.place], row.place)
                for row in rows
            )
            places.append(place)
            held.append(n)
        engine.select([*range(n_old), *places])
        engine.rewind([*before, *held])
    else:
        _begin(engine, prompts, cache, share=kv_cache)
        engine.select([0] * len(prompts))
    for row in new:
        row.place = n_old + prompts.index(row.text)


def _n_held(row: SequenceState, prompt: list[int], context_length: int) -> int:
    """How many tokens of a prompt a row holds."""
    if row.start or len(prompt) > context_length:  # one has slid
        return 0
    return min(
        common_prefix_length(prompt, row.text), len(row.text) - 1
    )  # behind that there may be guesses


def _begin(
    engine: Engine, texts: list[list[int]], cache: PromptCache | None, *, share: bool
) -> None:
    """Leaves one row with what all texts begin with and need not be computed for each."""
    if not share or max(map(len, texts)) > engine.context_length:  # one that slid shares nothing
        reset(engine, 1)
        return
    n_shared = min(common_prefix_length(min(texts), max(texts)), min(map(len, texts)) - 1)
    shared = texts[0][:n_shared]  # each has at least one token more
    n = begin_with(engine, shared, cache)
    if len(texts) > 1 and n < n_shared:
        engine.extend([shared[n:]])


def _settle(engine: Engine, rows: list[SequenceState]) -> list[SequenceState]:
    """Gives every row a place of its own, and moves as few as can be."""
    settled: dict[int, SequenceState] = {}
    others = []
    for row in rows:
        if row.place < len(rows) and row.place not in settled:
            settled[row.place] = row
        else:
            others.append(row)
    free = [place for place in range(len(rows)) if place not in settled]
    settled |= dict(zip(free, others, strict=True))
    found = [settled[place] for place in range(len(rows))]
    places = [row.place for row in found]
    if rows and places != list(range(len(engine.lengths))):
        engine.select(places)
    for place, row in enumerate(found):
        row.place = place
    return found


def _step(
    engine: Engine, rows: list[SequenceState], drafts: NgramDrafter | None, *, kv_cache: bool
) -> tuple[list[Pick], Logits]:
    """One pass, and what is picked by it."""
    first = {row.place: row for row in reversed(rows)}  # a place's rows are alike up to here
    placed = [first[place] for place in range(len(first))]
    new = _prepare(engine, placed, kv_cache=kv_cache)
    guesses: list[list[int]] = [[] for _ in placed]
    if drafts is not None and max(map(len, new)) == 1 and len(placed) == len(rows):
        n, context = len(rows), engine.context_length
        guesses = [_guess(drafts, row, context, n_rows=n) for row in placed]
    logits = _extend(engine, new, guesses)
    return _pick(logits, rows, guesses), logits


def _prepare(engine: Engine, rows: list[SequenceState], *, kv_cache: bool) -> list[list[int]]:
    """Rewinds rows that slid (or, uncached, all) and wrong guesses; what each row needs next."""
    held = engine.lengths
    for place, row in enumerate(rows):
        start = window_start(len(row.text), engine.context_length)
        if start != row.start or not kv_cache:
            row.start, held[place] = start, 0
        held[place] = min(held[place], len(row.text) - 1 - start)
    engine.rewind(held)
    return [row.text[row.start + held[place] :] for place, row in enumerate(rows)]


def _guess(
    drafts: NgramDrafter, row: SequenceState, context_length: int, *, n_rows: int
) -> list[int]:
    room = min(row.start + context_length, row.longest - 1) - len(row.text)
    return drafts.propose(row.number, row.text, n_rows=n_rows, most=room)


def _extend(engine: Engine, new: list[list[int]], guesses: list[list[int]]) -> Logits:
    """Logits after each row's last token and after each of its guesses, (N, V)."""
    if not any(guesses):
        return engine.extend(new)
    tokens = [last + propose for last, propose in zip(new, guesses, strict=True)]
    return np.concatenate(engine.extend(tokens, every_position=True))


class _Turn(NamedTuple):
    """A row and the place of the logits that say what follows it."""

    row: SequenceState
    place: int


def _pick(logits: Logits, rows: list[SequenceState], guesses: list[list[int]]) -> list[Pick]:
    """Lengthens each row by what the sampler picks, once more after each guess that was right."""
    expected = [
        propose for guessed in guesses for propose in (*guessed, None)
    ]  # a place of the logits
    firsts = list(accumulate((len(guessed) + 1 for guessed in guesses), initial=0))
    going = [_Turn(row, firsts[row.place]) for row in rows]
    picks: list[Pick] = []
    while going:
        drawn = _draw(logits, going)
        right = []
        for (row, place), (token, removed) in zip(going, drawn, strict=True):
            shown, finish = row.take(token)
            n_likeliest = row.sampling.logprobs
            complete = row.complete if finish else True
            picks.append(
                Pick(row.number, token, place, shown, finish, complete, n_likeliest, removed)
            )
            if token == expected[place] and not finish:
                right.append(_Turn(row, place + 1))
        going = right
    return picks


def _draw(logits: Logits, turns: list[_Turn]) -> list[tuple[int, list[Removed]]]:
    """A token for each row, and what was removed before; rows that are drawn alike, together."""
    drawn: list[tuple[int, list[Removed]]] = [(0, []) for _ in turns]
    alike: dict[LogitsProcessors, list[int]] = {}
    for i, turn in enumerate(turns):
        alike.setdefault(turn.row.rules, []).append(i)
    for members in alike.values():
        some = [turns[i] for i in members]
        sampling = some[0].row.sampling
        asked = at(logits, [turn.place for turn in some])
        if not all(turn.row.free for turn in some):
            asked = asked.copy()
            for values, turn in zip(asked, some, strict=True):
                turn.row.rule(values)
        explanations: list[list[Removed]] = [[] for _ in some if sampling.explain]
        tokens = sample(
            asked,
            sampling,
            seeds=[turn.row.sampling.seed for turn in some],
            positions=[len(turn.row.text) for turn in some],
            explanations=explanations,
        )
        for i, token, removed in zip(
            members, tokens, explanations or [[] for _ in some], strict=True
        ):
            drawn[i] = token, removed
    return drawn
