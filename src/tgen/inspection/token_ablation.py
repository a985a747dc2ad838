"""Token ablation: the logit and the log-probability of a target without each token before it."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tgen.inspection.hooks import token_batch
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer

_BATCH_TEXTS = 8  # each without one token; a pass computes them from the first of these tokens on
_BATCH_TOKENS = 4096  # of such texts
_BATCH_LOGITS = 1 << 24  # of such texts


def leave_one_out(
    model: Transformer,
    ids: Sequence[int],
    target: Sequence[int],
    left_out: range | None,
    progress: Callable[[float], None],
) -> dict[int, tuple[float, float]]:
    """Return the target's logit and log-probability after `ids` without each token, by position;
    nothing predicts it without the only one."""
    n, length = len(target), len(ids) - 1 + len(target) - 1
    if len(ids) == 1:
        return {}
    effects: dict[int, tuple[float, float]] = {}
    candidates = range(len(ids)) if left_out is None else left_out
    most_logits = _BATCH_LOGITS // (n * model.config.vocab_size)
    batch_size = max(1, min(_BATCH_TEXTS, _BATCH_TOKENS // length, most_logits))
    device, dtype = model.token_embedding.weight.device, next(model.parameters()).dtype
    cache = KVCache(model.config, 1, device=device, dtype=dtype)
    for start in range(0, len(candidates), batch_size):
        batch = candidates[start : start + batch_size]
        first = min(batch[0], len(ids) - 2)  # one token is left to predict the target
        before = ids[cache.lengths[0] : first]
        if before:
            model.hidden_states(token_batch(model, [before]), cache=cache)
        cache.select([0] * len(batch))
        texts = [[*ids[first:i], *ids[i + 1 :], *target[:-1]] for i in batch]
        x = model.hidden_states(token_batch(model, texts), cache=cache)[:, -n:]
        effects |= zip(batch, zip(*score_target(model, x, target), strict=True), strict=True)
        cache.select([0])
        cache.rewind([first])
        progress((start + len(batch)) / len(candidates))
    return effects


def score_target(
    model: Transformer, x: Tensor, target: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return the sums of the target's logits and of its log-probabilities, per text of final
    hidden states (B, n, C) that predict its n tokens."""
    logits = model.logits(x).double()  # (B, n, V)
    index = token_batch(model, [target])[..., None].expand(len(x), -1, 1)
    sums = (
        values.gather(2, index).sum(dim=(1, 2)).tolist()
        for values in (logits, logits.log_softmax(dim=-1))
    )
    return next(sums), next(sums)
