"""Activation patching (Vig et al. 2020, Meng et al. 2022): which activations of a prompt restore
its answer when they replace those of another prompt.

Run on the other prompt, the model gives another answer. Each activation of the prompt replaces the
other's in a pass of its own. Its score is the share of the logit difference of two tokens that this
restores: 0 is the difference after the other prompt, 1 the one after the prompt.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tgen.errors import UsageError
from tgen.inspection.hooks import (
    hook_part,
    hooks_removed,
    parts_recorded,
    record_residuals,
    run_blocks,
    token_batch,
)
from tgen.model.transformer import ForwardContext, Transformer
from tgen.reports.inspection import PatchReport
from tgen.tokenizer import Tokenizer

_BATCH_TOKENS = 4096  # in a pass of several texts, each with one activation replaced
_MIN_DIFFERENCE = 1e-4  # between the two prompts: smaller ones are rounding errors


@torch.no_grad()
def patch_activations(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    other: Sequence[int],
    parts: Sequence[str],
    *,
    target: int | None = None,
    contrast: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> list[PatchReport]:
    """Return the score of every layer and position, or of `heads` of every layer and head (at all
    positions), one report per part.

    The logits of `target` and `contrast` are compared, by default the most likely tokens after the
    prompt and after the other one, which has as many tokens. Raises UsageError if they are the same
    token, or their logit difference is the same after both prompts.
    """
    layers = range(model.config.n_layers)
    sources: dict[tuple[str, int], Tensor] = {}  # (T, ...)

    def keep(part: str, layer: int, values: Tensor) -> None:
        sources[part, layer] = values[0]

    with parts_recorded(model, product(parts, layers), keep):
        x = model.hidden_states(token_batch(model, [ids]))[0, -1]
    vectors, contexts = record_residuals(model, other)
    other_x = model.final_norm(vectors[-1][0, -1])
    logits = model.logits(torch.stack([x, other_x])).double()
    target, contrast = _choose_tokens(tokenizer, logits, target, contrast)
    clean, corrupted = (logits[:, target] - logits[:, contrast]).tolist()
    batch_size = max(1, _BATCH_TOKENS // len(ids))
    n_equal = next(i for i, pair in enumerate(zip(ids, other, strict=True)) if pair[0] != pair[1])
    reports: list[PatchReport] = []
    for part in parts:
        scores = np.zeros((len(layers), model.config.n_heads if part == "heads" else len(ids)))
        n_skipped = 0 if part == "heads" else n_equal  # equal beginnings have equal activations
        for layer in layers:
            for start in range(n_skipped, scores.shape[1], batch_size):
                sites = range(scores.shape[1])[start : start + batch_size]
                source = sources[part, layer]
                patched = _run_patched(model, part, layer, sites, source, vectors[layer], contexts)
                difference = (patched[:, target] - patched[:, contrast]).cpu().numpy()
                scores[layer, sites] = (difference - corrupted) / (clean - corrupted)
            progress((len(reports) + (layer + 1) / len(layers)) / len(parts))
        reports.append(
            PatchReport(
                part=part,
                scores=scores.astype(np.float32),
                target=target,
                target_text=tokenizer.token_bytes(target),
                contrast=contrast,
                contrast_text=tokenizer.token_bytes(contrast),
                difference=clean,
                other_difference=corrupted,
                other_ids=list(other),
                other_tokens=[tokenizer.token_bytes(i) for i in other],
            )
        )
    return reports


def _choose_tokens(
    tokenizer: Tokenizer, logits: Tensor, target: int | None, contrast: int | None
) -> tuple[int, int]:
    """Return the tokens to compare: those that are given, or the most likely ones after the two
    prompts, whose logits are (2, V). Raise UsageError if they do not tell the prompts apart."""
    answers = logits.argmax(dim=1).tolist()
    target = answers[0] if target is None else target
    contrast = answers[1] if contrast is None else contrast
    pair = target, contrast
    first, second = (repr(tokenizer.token_bytes(i).decode(errors="replace")) for i in pair)
    if target == contrast:
        raise UsageError(
            f"--target and --contrast: the same token (got {first} for both)",
            "name another token by --contrast, or pass a prompt with another answer",
        )
    clean, corrupted = (logits[:, target] - logits[:, contrast]).tolist()
    if abs(clean - corrupted) < _MIN_DIFFERENCE:
        raise UsageError(
            f"--patch: the logit difference of {first} and {second} is {clean:.4g} after both "
            "prompts",
            "pass another prompt, --target or --contrast",
        )
    return pair


def _run_patched(
    model: Transformer,
    part: str,
    layer: int,
    sites: range,
    source: Tensor,
    x: Tensor,
    contexts: Sequence[ForwardContext],
) -> Tensor:
    """Return the logits after the last position (n, V) in float64, for n texts that each have
    `source` at one site: a position, or a head.

    The layer's input is x (1, T, C); layers below are not computed.
    """

    def patch(values: Tensor) -> Tensor:
        values = values.clone()
        for row, site in enumerate(sites):
            if part == "heads":
                values[row, :, site] = source[:, site]
            else:
                values[row, site] = source[site]
        return values

    with hooks_removed(hook_part(model, part, layer, patch)):
        x = run_blocks(model, x.expand(len(sites), -1, -1), contexts, layer)
    return model.logits(model.final_norm(x[:, -1])).double()
