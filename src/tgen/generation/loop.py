"""The generation loop: rows of prompts -> one token a row and step, until each row ends.

Past the context a row slides: when full, its last half is kept and computed anew. Where a row's
window starts depends on its number of tokens alone, so a text goes on the same way whether its
beginning was generated or given.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tgen.config import SamplingConfig
from tgen.engine.base import Engine, Logits, reset
from tgen.generation.draw import draw
from tgen.reports import Token


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingConfig,
    stop: Collection[int],
    max_new_tokens: int,
    kv_cache: bool = True,
) -> Iterator[Token]:
    """Yields a Token for every row and step; a row ends with a token of `stop` or at the maximum.

    Prompts must not be empty. Without `kv_cache` the same engine computes each row's whole window
    again for every token.
    """
    if not prompts:
        return
    if not all(prompts):
        raise ValueError("a prompt needs at least one token")
    texts = [list(prompt) for prompt in prompts]
    rows = list(range(len(texts)))  # the rows still running, by their place in the engine
    starts = [window_start(len(text), engine.context_length) for text in texts]
    reset(engine, 1)
    if kv_cache and not any(starts) and (shared := _shared(texts)):
        engine.extend([texts[0][:shared]])  # once for all rows
    engine.select([0] * len(rows))
    for step in range(max_new_tokens):
        logits = engine.extend(_prepare(engine, rows, texts, starts, kv_cache=kv_cache))
        positions = [len(texts[row]) for row in rows]
        tokens = draw(logits, sampling, rows=rows, positions=positions)
        ended = [token in stop or step + 1 == max_new_tokens for token in tokens]
        for report in _reports(rows, tokens, ended, logits):
            texts[report.row].append(report.id)
            yield report
        kept = [place for place, token in enumerate(tokens) if token not in stop]
        if not kept:
            return
        if len(kept) < len(rows):
            rows = [rows[place] for place in kept]
            engine.select(kept)


def _shared(texts: list[list[int]]) -> int:
    """Tokens with which several texts begin alike, each having at least one more."""
    if len(texts) == 1:
        return 0
    pairs = zip(min(texts), max(texts), strict=False)  # what these two share, all do
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, texts)))
    return min(alike, min(map(len, texts)) - 1)


def window_start(n_tokens: int, context_length: int) -> int:
    """The first token still seen when a row of `n_tokens` has slid as often as it must."""
    if n_tokens <= context_length:
        return 0
    stride = max(1, context_length - context_length // 2)
    return stride * -(-(n_tokens - context_length) // stride)


def _prepare(
    engine: Engine, rows: list[int], texts: list[list[int]], starts: list[int], *, kv_cache: bool
) -> list[list[int]]:
    """Rewinds rows that slid (or, uncached, all); what each row must then be extended with."""
    held = engine.lengths
    for place, row in enumerate(rows):
        start = window_start(len(texts[row]), engine.context_length)
        if start != starts[row] or not kv_cache:
            starts[row], held[place] = start, 0
    engine.rewind(held)
    return [texts[row][starts[row] + held[place] :] for place, row in enumerate(rows)]


def _reports(
    rows: Sequence[int], tokens: Sequence[int], ended: Sequence[bool], logits: Logits
) -> Iterator[Token]:
    """What the model itself, before any sampler, thought of each row's token."""
    with np.errstate(over="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    totals = weights.sum(axis=1, dtype=np.float64)
    # Of p = w / t with w = exp(s): -sum p log p = log t - sum w s / t.
    products = weights * np.maximum(shifted, -1e30)  # a logit of -inf adds nothing
    entropies = np.log(totals) - products.sum(axis=1, dtype=np.float64) / totals
    for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        chosen = shifted[place, token]
        yield Token(
            row=row,
            id=token,
            logprob=float(chosen - np.log(totals[place])),
            rank=int((shifted[place] > chosen).sum()),
            entropy=max(0.0, float(entropies[place])),
            last=ended[place],
        )
