"""Next-token predictions: after the text, and at every token of it."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tgen.inspection.hooks import iterate_logits, token_batch
from tgen.model.transformer import Transformer
from tgen.reports.inspection import Prediction, TextReport, TokenReport
from tgen.tokenizer import Tokenizer


def top_predictions(logits: Tensor, tokenizer: Tokenizer, top: int) -> list[Prediction]:
    """Return the `top` most likely tokens, the most likely first; logits: (V,) float32."""
    probabilities = logits.softmax(dim=-1)
    ids = probabilities.topk(min(top, len(probabilities))).indices.tolist()
    return [
        Prediction(
            id=i,
            text=tokenizer.token_bytes(i),
            probability=float(probabilities[i]),
            logit=float(logits[i]),
        )
        for i in ids
    ]


@torch.no_grad()
def score_text(model: Transformer, tokenizer: Tokenizer, ids: Sequence[int]) -> TextReport:
    """Return each token's surprisal, -log2 p(token | preceding tokens), and the top prediction."""
    x = model.hidden_states(token_batch(model, [ids]))[0]  # (T, C)
    targets = token_batch(model, [ids[1:]])[0]
    predicted: list[Any] = [(None, None, None, None)]
    for chunk, logits in iterate_logits(model, x[:-1]):
        log_p = logits.log_softmax(dim=-1)  # (n, V)
        target_log_p = log_p.gather(1, targets[chunk, None])  # (n, 1)
        top = log_p.max(dim=-1)
        surprisal = -target_log_p[:, 0] / math.log(2)
        columns = surprisal, (log_p > target_log_p).sum(dim=-1), top.indices, top.values.exp()
        predicted += zip(*(column.tolist() for column in columns), strict=True)
    texts = [tokenizer.token_bytes(i) for i in ids]
    offsets = [0, *accumulate(map(len, texts))]
    tokens = [
        TokenReport(
            index=i,
            id=ids[i],
            text=texts[i],
            byte_offset=offsets[i],
            surprisal=surprisal,
            rank=rank,
            top_id=top_id,
            top_text=None if top_id is None else tokenizer.token_bytes(top_id),
            top_probability=probability,
        )
        for i, (surprisal, rank, top_id, probability) in enumerate(predicted)
    ]
    bits = sum(token.surprisal or 0.0 for token in tokens)
    n_predicted, n_bytes = len(ids) - 1, offsets[-1] - len(texts[0])
    nats = bits * math.log(2) / n_predicted if n_predicted else None
    return TextReport(
        tokens=tokens,
        n_bytes=offsets[-1],
        nats_per_token=nats,
        perplexity=None if nats is None else math.exp(min(nats, 700)),
        bits_per_byte=bits / n_bytes if n_bytes else None,
    )
