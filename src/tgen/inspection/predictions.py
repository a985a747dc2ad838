"""What the model expects: after the text, and at each token of it."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tgen.inspection.attention import batch_of
from tgen.inspection.hooks import logits_in_parts
from tgen.model.transformer import Transformer
from tgen.reports import Prediction, TextReport, TokenReport
from tgen.tokenizer import Tokenizer


@torch.no_grad()
def next_tokens(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    query: int = -1,
    top: int = 10,
) -> list[Prediction]:
    """The `top` most likely tokens after position `query`, with the model's own probabilities."""
    x = model.hidden(batch_of(model, [ids]))[0, query]
    return candidates_of(model.logits(x).float(), tokenizer, top)


def candidates_of(logits: Tensor, tokenizer: Tokenizer, top: int) -> list[Prediction]:
    """(V,) float32 logits -> the `top` likeliest, the first first."""
    probabilities = logits.softmax(dim=-1)
    best = probabilities.topk(min(top, len(probabilities))).indices.tolist()
    return [
        Prediction(
            id=i,
            text=tokenizer.token_bytes(i),
            probability=float(probabilities[i]),
            logit=float(logits[i]),
        )
        for i in best
    ]


@torch.no_grad()
def text_of(model: Transformer, tokenizer: Tokenizer, ids: Sequence[int]) -> TextReport:
    """Every token with its surprisal, -log2 p(token | all before), and what was expected there."""
    x = model.hidden(batch_of(model, [ids]))[0]  # (T, C)
    surprisal: list[float | None] = [None]
    ranks: list[int | None] = [None]
    likeliest: list[int | None] = [None]
    chances: list[float | None] = [None]
    targets = batch_of(model, [ids[1:]])[0]
    for part, logits in logits_in_parts(model, x[:-1]):
        log_p = logits.log_softmax(dim=-1)  # (n, V)
        own = log_p.gather(1, targets[part, None])  # (n, 1)
        best = log_p.max(dim=-1)
        surprisal += (-own[:, 0] / math.log(2)).tolist()
        ranks += (log_p > own).sum(dim=-1).tolist()
        likeliest += best.indices.tolist()
        chances += best.values.exp().tolist()
    pieces = [tokenizer.token_bytes(i) for i in ids]
    starts = [0, *accumulate(map(len, pieces))]
    tokens = [
        TokenReport(
            index=i,
            id=ids[i],
            text=pieces[i],
            start=starts[i],
            surprisal=surprisal[i],
            rank=ranks[i],
            likeliest=expected,
            likeliest_text=None if expected is None else tokenizer.token_bytes(expected),
            likeliest_probability=chances[i],
        )
        for i, expected in enumerate(likeliest)
    ]
    bits = sum(token.surprisal or 0.0 for token in tokens)
    n_predicted, n_bytes = len(ids) - 1, starts[-1] - len(pieces[0])
    nats = bits * math.log(2) / n_predicted if n_predicted else None
    return TextReport(
        tokens=tokens,
        n_bytes=starts[-1],
        nats_per_token=nats,
        perplexity=None if nats is None else math.exp(min(nats, 700)),
        bits_per_byte=bits / n_bytes if n_bytes else None,
    )
