"""Logit lens: the prediction from the residual stream after each layer (nostalgebraist 2020).

The final norm computes its statistics from each layer's own vectors.
"""

from collections.abc import Sequence

import torch

from tgen.errors import UsageError
from tgen.inspection.hooks import iterate_logits, record_residuals
from tgen.inspection.predictions import top_predictions
from tgen.model.transformer import Transformer
from tgen.reports.inspection import LensReport
from tgen.tokenizer import Tokenizer


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
