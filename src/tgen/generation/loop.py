"""The generation loop: rows of prompts -> tokens, until each row ends.

Past the context a row slides: when full, its last half is kept and computed anew. Where a row's
window starts depends on its number of tokens alone, so a text goes on the same way whether its
beginning was generated or given.

With drafts a pass computes guesses too. The one sampler picks a token after each of them, and the
picks stand up to the first that is not what was guessed: without drafts the text is the same.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, PromptCache, n_alike, reset
from tgen.generation.drafts import Drafts
from tgen.generation.draw import draw
from tgen.reports import Token


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
    texts = [list(prompt) for prompt in prompts]
    longest = [len(prompt) + max_new_tokens for prompt in prompts]
    rows = list(range(len(texts)))  # the rows still running, by their place in the engine
    starts = [window_start(len(text), engine.context_length) for text in texts]
    reset(engine, 1)
    if kv_cache and not any(starts):
        shared = texts[0][: _n_shared(texts)]
        n = 0 if prompt_cache is None else restore(engine, shared, prompt_cache)
        if len(texts) > 1 and shared[n:]:
            engine.extend([shared[n:]])  # once for all rows
    engine.select([0] * len(rows))
    while rows:
        fed = _prepare(engine, rows, texts, starts, kv_cache=kv_cache)
        guesses: list[list[int]] = [[] for _ in rows]
        if drafts is not None and kv_cache and max(map(len, fed)) == 1:
            for place, row in enumerate(rows):
                most = min(starts[row] + engine.context_length, longest[row] - 1) - len(texts[row])
                guesses[place] = drafts.guess(row, texts[row], n_rows=len(rows), most=most)
        logits = _extend(engine, fed, guesses)
        picks = _pick(logits, rows, guesses, texts, longest, stop, sampling)
        yield from _reports(picks, logits)
        finished = {pick.row for pick in picks if pick.last}
        kept = [place for place, row in enumerate(rows) if row not in finished]
        if not kept:
            return
        if len(kept) < len(rows):
            rows = [rows[place] for place in kept]
            engine.select(kept)


def restore(engine: Engine, tokens: Sequence[int], cache: PromptCache) -> int:
    """Leaves one row that holds as many of the first tokens as the cache has: how many."""
    n = n_alike(tokens, cache.tokens)
    engine.restore(cache.keys[:, :, :n], cache.values[:, :, :n])
    return n


def _n_shared(texts: list[list[int]]) -> int:
    """Tokens with which all texts begin alike, each having at least one more."""
    return min(n_alike(min(texts), max(texts)), min(map(len, texts)) - 1)


def window_start(n_tokens: int, context_length: int) -> int:
    """The first token still seen when a row of `n_tokens` has slid as often as it must."""
    if n_tokens <= context_length:
        return 0
    stride = max(1, context_length - context_length // 2)
    return stride * -(-(n_tokens - context_length) // stride)


def _prepare(
    engine: Engine, rows: list[int], texts: list[list[int]], starts: list[int], *, kv_cache: bool
) -> list[list[int]]:
    """Rewinds rows that slid (or, uncached, all) and what was guessed wrong; what each row must
    then be extended with."""
    held = engine.lengths
    for place, row in enumerate(rows):
        start = window_start(len(texts[row]), engine.context_length)
        if start != starts[row] or not kv_cache:
            starts[row], held[place] = start, 0
        held[place] = min(held[place], len(texts[row]) - 1 - start)
    engine.rewind(held)
    return [texts[row][starts[row] + held[place] :] for place, row in enumerate(rows)]


def _extend(engine: Engine, fed: list[list[int]], guesses: list[list[int]]) -> Logits:
    """Logits after each row's last token and after each of its guesses, (N, V)."""
    if not any(guesses):
        return engine.extend(fed)
    tokens = [new + guess for new, guess in zip(fed, guesses, strict=True)]
    return np.concatenate(engine.extend(tokens, every_position=True))


def _pick(
    logits: Logits,
    rows: list[int],
    guesses: list[list[int]],
    texts: list[list[int]],
    longest: list[int],
    stop: Collection[int],
    sampling: SamplingConfig,
) -> list[_Pick]:
    """Lengthens each row by what the sampler picks, once more after each guess that was right."""
    expected = [guess for guessed in guesses for guess in (*guessed, None)]  # a place of the logits
    sizes = [len(guessed) + 1 for guessed in guesses]
    places = dict(zip(rows, accumulate(sizes, initial=0), strict=False))
    picks: list[_Pick] = []
    while places:
        asked = logits if len(places) == len(logits) else logits[list(places.values())]
        positions = [len(texts[row]) for row in places]
        tokens = draw(asked, sampling, rows=list(places), positions=positions)
        right = {}
        for (row, place), token in zip(places.items(), tokens, strict=True):
            texts[row].append(token)
            last = token in stop or len(texts[row]) == longest[row]
            picks.append(_Pick(row, token, place, last))
            if token == expected[place] and not last:
                right[row] = place + 1
        places = right
    return picks


def _reports(picks: Sequence[_Pick], logits: Logits) -> Iterator[Token]:
    """What the model itself, before any sampler, thought of each token."""
    places = [pick.place for pick in picks]
    if places != list(range(len(logits))):
        logits = logits[places]
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    totals = weights.sum(axis=1, dtype=np.float64)
    # Of p = w / t with w = exp(s): -sum p log p = log t - sum w s / t.
    products = weights * np.maximum(shifted, -1e30)  # a logit of -inf adds nothing
    entropies = np.log(totals) - products.sum(axis=1, dtype=np.float64) / totals
    for i, pick in enumerate(picks):
        chosen = shifted[i, pick.id]
        yield Token(
            row=pick.row,
            id=pick.id,
            logprob=float(chosen - np.log(totals[i])),
            rank=int((shifted[i] > chosen).sum()),
            entropy=max(0.0, float(entropies[i])),
            last=pick.last,
        )
