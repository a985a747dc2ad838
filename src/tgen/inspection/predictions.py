"""Next-token predictions: after the text, at every token of it, and from each layer (logit lens).

The logit lens (nostalgebraist 2020) predicts from each layer's residual stream. The final norm
computes its statistics from each layer's own vectors.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tgen.errors import UsageError
from tgen.inspection.hooks import iterate_logits, record_residuals, token_batch
from tgen.model.transformer import Transformer
from tgen.reports.inspection import LensReport, Prediction, TextReport, TokenReport
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


@torch.no_grad()
def logit_lens(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    query: int,
    first: int = 0,
    last: int | None = None,
    top: int = 5,
) -> LensReport:
    """Return the top prediction after each layer at the positions `first` to `last`, and the `top`
    candidates at `query`. Raises UsageError for a post-norm model."""
    if model.config.post_norm:  # no sum runs through all its layers
        raise UsageError(
            f"--view lens: not available for post-norm models ({model.config.family} normalizes "
            "after each residual addition)",
            "use --view predict, attention or rollout, or a model of the family gpt2 or llama",
        )
    last = len(ids) - 1 if last is None else last
    residuals, _ = record_residuals(model, ids)
    top_ids, top_probabilities, candidates = [], [], []
    answer = int(model.logits(model.final_norm(residuals[-1][0, query])).argmax())
    answer_ranks, answer_probabilities = [], []
    for x in residuals:
        layer_ids, layer_probabilities = [], []
        for _, logits in iterate_logits(model, model.final_norm(x[0, first : last + 1])):
            best = logits.softmax(dim=-1).max(dim=-1)
            layer_ids += best.indices.tolist()
            layer_probabilities += best.values.tolist()
        top_ids.append(layer_ids)
        top_probabilities.append(layer_probabilities)
        logits = model.logits(model.final_norm(x[0, query])).float()
        candidates.append(top_predictions(logits, tokenizer, top))
        answer_ranks.append(int((logits > logits[answer]).sum()))
        answer_probabilities.append(float(logits.softmax(dim=-1)[answer]))
    return LensReport(
        layers=["embedding", *(f"layer {i}" for i in range(model.config.n_layers))],
        first=first,
        top_ids=top_ids,
        top_texts=[[tokenizer.token_bytes(i) for i in layer_ids] for layer_ids in top_ids],
        top_probabilities=torch.tensor(top_probabilities).numpy(),
        query=query,
        candidates=candidates,
        answer=answer,
        answer_text=tokenizer.token_bytes(answer),
        answer_ranks=answer_ranks,
        answer_probabilities=answer_probabilities,
    )
