"""The generation loop: rows of prompts -> tokens, until each row ends.

Past the context a row slides: when full, its last half is kept and computed anew. Where a row's
window starts depends on its number of tokens alone, so a text goes on the same way whether its
beginning was generated or given.

With drafts a pass computes guesses too. The one sampler picks a token after each of them, and the
picks stand up to the first that is not what was guessed: without drafts the text is the same.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, PromptCache, n_alike, reset
from tgen.generation.drafts import Drafts
from tgen.generation.draw import draw
from tgen.generation.rules import Rules
from tgen.reports import Token


@dataclass
class _Row:
    """A text on its way."""

    number: int
    text: list[int]
    n_given: int  # tokens of its prompt
    longest: int  # that it may come to
    start: int  # the first token in sight


class _Pick(NamedTuple):
    """A token that the sampler picked, and the place of the logits it was picked by."""

    row: int
    id: int
    place: int
    last: bool  # of its row


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingConfig,
    stop: Collection[int],
    max_new_tokens: int,
    kv_cache: bool = True,
    rules: Rules | None = None,
    drafts: Drafts | None = None,
    prompt_cache: PromptCache | None = None,
) -> Iterator[Token]:
    """Yields every row's Tokens; a row ends with a token of `stop` or at the maximum.

    Prompts must not be empty. What they begin with is taken from `prompt_cache` as far as it is
    there. Without `kv_cache` the same engine computes each row's whole window again for every
    token, and nothing is guessed.
    """
    if not prompts or max_new_tokens < 1:
        return
    if not all(prompts):
        raise ValueError("a prompt needs at least one token")
    context, rules = engine.context_length, rules or Rules(sampling)
    rows = [
        _Row(number, list(prompt), n, n + max_new_tokens, window_start(n, context))
        for number, prompt in enumerate(prompts)
        for n in [len(prompt)]
    ]
    reset(engine, 1)
    if kv_cache and not any(row.start for row in rows):
        _begin(engine, [row.text for row in rows], prompt_cache)
    engine.select([0] * len(rows))
    while rows:
        new = _prepare(engine, rows, kv_cache=kv_cache)
        guesses: list[list[int]] = [[] for _ in rows]
        if drafts is not None and kv_cache and max(map(len, new)) == 1:
            guesses = [_guess(drafts, row, context, n_rows=len(rows)) for row in rows]
        logits = _extend(engine, new, guesses)
        picks = _pick(logits, rows, guesses, stop, sampling, rules)
        yield from _reports(picks, logits)
        ended = {pick.row for pick in picks if pick.last}
        kept = [place for place, row in enumerate(rows) if row.number not in ended]
        if not kept:
            return
        if ended:
            rows = [rows[place] for place in kept]
            engine.select(kept)
            if drafts is not None:
                drafts.forget(ended)


def begin_with(engine: Engine, tokens: Sequence[int], cache: PromptCache | None) -> int:
    """Leaves one row with as many of the first tokens as the cache has; how many they are."""
    n = n_alike(tokens, cache.tokens) if cache else 0
    if cache and n:
        engine.restore(cache.keys[:, :, :n], cache.values[:, :, :n])
    else:
        reset(engine, 1)
    return n


def window_start(n_tokens: int, context_length: int) -> int:
    """The first token still seen when a row of `n_tokens` has slid as often as it must."""
    if n_tokens <= context_length:
        return 0
    stride = max(1, context_length - context_length // 2)
    return stride * -(-(n_tokens - context_length) // stride)


def _begin(engine: Engine, texts: list[list[int]], cache: PromptCache | None) -> None:
    """Leaves one row with what all texts begin with and need not be computed for each."""
    n_shared = min(n_alike(min(texts), max(texts)), min(map(len, texts)) - 1)
    shared = texts[0][:n_shared]  # each has at least one token more
    n = begin_with(engine, shared, cache)
    if len(texts) > 1 and n < n_shared:
        engine.extend([shared[n:]])


def _prepare(engine: Engine, rows: list[_Row], *, kv_cache: bool) -> list[list[int]]:
    """Rewinds rows that slid (or, uncached, all) and wrong guesses; what each row needs next."""
    held = engine.lengths
    for place, row in enumerate(rows):
        start = window_start(len(row.text), engine.context_length)
        if start != row.start or not kv_cache:
            row.start, held[place] = start, 0
        held[place] = min(held[place], len(row.text) - 1 - start)
    engine.rewind(held)
    return [row.text[row.start + held[place] :] for place, row in enumerate(rows)]


def _guess(drafts: Drafts, row: _Row, context_length: int, *, n_rows: int) -> list[int]:
    room = min(row.start + context_length, row.longest - 1) - len(row.text)
    return drafts.guess(row.number, row.text, n_rows=n_rows, most=room)


def _extend(engine: Engine, new: list[list[int]], guesses: list[list[int]]) -> Logits:
    """Logits after each row's last token and after each of its guesses, (N, V)."""
    if not any(guesses):
        return engine.extend(new)
    tokens = [last + guess for last, guess in zip(new, guesses, strict=True)]
    return np.concatenate(engine.extend(tokens, every_position=True))


def _pick(
    logits: Logits,
    rows: list[_Row],
    guesses: list[list[int]],
    stop: Collection[int],
    sampling: SamplingConfig,
    rules: Rules,
) -> list[_Pick]:
    """Lengthens each row by what the sampler picks, once more after each guess that was right."""
    expected = [guess for guessed in guesses for guess in (*guessed, None)]  # a place of the logits
    firsts = accumulate((len(guessed) + 1 for guessed in guesses), initial=0)
    going = list(zip(rows, firsts, strict=False))  # rows, each with its next place
    picks: list[_Pick] = []
    while going:
        places = [place for _, place in going]
        texts = [row.text for row, _ in going]
        asked = rules.apply(_at(logits, places), texts, [row.n_given for row, _ in going])
        numbers = [row.number for row, _ in going]
        tokens = draw(asked, sampling, rows=numbers, positions=[len(text) for text in texts])
        right = []
        for (row, place), token in zip(going, tokens, strict=True):
            row.text.append(token)
            last = token in stop or len(row.text) == row.longest
            picks.append(_Pick(row.number, token, place, last))
            if token == expected[place] and not last:
                right.append((row, place + 1))
        going = right
    return picks


def _at(logits: Logits, places: list[int]) -> Logits:
    """These rows of the logits, without a copy where they are all of them in order."""
    return logits if places == list(range(len(logits))) else logits[places]


def _reports(picks: Sequence[_Pick], logits: Logits) -> Iterator[Token]:
    """What the model itself, before any sampler, thought of each token."""
    logits = _at(logits, [pick.place for pick in picks])
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    totals = weights.sum(axis=1, dtype=np.float64)
    # Of p = w / t with w = exp(s): -sum p log p = log t - sum w s / t.
    products = weights * np.maximum(shifted, -1e30)  # a logit of -inf adds nothing
    entropies = np.log(totals) - products.sum(axis=1, dtype=np.float64) / totals
    chosen = shifted[np.arange(len(picks)), [pick.id for pick in picks]]
    ranks = (shifted > chosen[:, None]).sum(axis=1)
    thoughts = (chosen - np.log(totals), ranks, np.maximum(entropies, 0.0))
    found = zip(*(values.tolist() for values in thoughts), strict=True)
    for pick, (logprob, rank, entropy) in zip(picks, found, strict=True):
        yield Token(
            row=pick.row, id=pick.id, logprob=logprob, rank=rank, entropy=entropy, last=pick.last
        )
