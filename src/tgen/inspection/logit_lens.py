"""The logit lens: what the model would say if it stopped after each layer (nostalgebraist 2020).

The final norm's statistics are those of the vectors it is given, layer by layer.
"""

from collections.abc import Sequence

import torch

from tgen.inspection.hooks import logits_in_parts, require_residual_stream, residuals
from tgen.inspection.predictions import candidates_of
from tgen.model.transformer import Transformer
from tgen.reports import LensReport
from tgen.tokenizer import Tokenizer


@torch.no_grad()
def lens_of(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    query: int,
    first: int = 0,
    last: int | None = None,
    top: int = 5,
) -> LensReport:
    """The first choice after each layer at the positions from `first` to `last`, and the best ones
    at `query`. Raises UsageError where norms stand after the addition."""
    require_residual_stream(model, "--view lens")
    last = len(ids) - 1 if last is None else last
    vectors, _ = residuals(model, ids)
    likeliest, probabilities, candidates = [], [], []
    answer_logits = model.logits(model.final_norm(vectors[-1][0, query]))
    answer = int(answer_logits.argmax())
    ranks, chances = [], []
    for x in vectors:
        rows = model.final_norm(x[0, first : last + 1])  # (n, C)
        chosen, p = [], []
        for _, part in logits_in_parts(model, rows):
            best = part.softmax(dim=-1).max(dim=-1)
            chosen += best.indices.tolist()
            p += best.values.tolist()
        likeliest.append(chosen)
        probabilities.append(p)
        logits = model.logits(model.final_norm(x[0, query])).float()
        candidates.append(candidates_of(logits, tokenizer, top))
        ranks.append(int((logits > logits[answer]).sum()))
        chances.append(float(logits.softmax(dim=-1)[answer]))
    return LensReport(
        layers=["embedding", *(f"layer {i}" for i in range(model.config.n_layers))],
        first=first,
        likeliest=likeliest,
        likeliest_text=[[tokenizer.token_bytes(i) for i in row] for row in likeliest],
        probabilities=torch.tensor(probabilities).numpy(),
        query=query,
        candidates=candidates,
        answer=answer,
        answer_text=tokenizer.token_bytes(answer),
        ranks=ranks,
        answer_probabilities=chances,
    )
