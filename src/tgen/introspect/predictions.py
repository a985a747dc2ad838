"""What the model expects next."""

from collections.abc import Sequence

import torch

from tgen.introspect.attention import check_length
from tgen.model.transformer import Transformer
from tgen.reports import Prediction
from tgen.tokenizer import Tokenizer


@torch.no_grad()
def next_tokens(
    model: Transformer, tokenizer: Tokenizer, ids: Sequence[int], *, top: int = 10
) -> list[Prediction]:
    """The `top` most likely tokens after a text, with the model's own probabilities."""
    check_length(len(ids), model.config.context_length)
    tokens = torch.tensor([list(ids)], device=model.token_embedding.weight.device)
    logits = model(tokens)[0, -1].float()
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
