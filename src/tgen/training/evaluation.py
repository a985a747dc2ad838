"""Evaluation: the loss on held-out text, with its standard error."""

import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np
import torch

from tgen import distributed
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import Batch, PackedRows, TokenDataset
from tgen.model.transformer import Transformer
from tgen.reports.standard_error import bits_per_byte_error
from tgen.training.loss import LossModule, to_device
from tgen.training.temperature_scaling import next_scale

# Loss in nats, its derivatives with respect to the logits' scale, targets that greedy decoding
# would not choose, and number of target tokens.
WindowLoss = tuple[float, float, float, float, int]

Batches = TokenDataset | PackedRows  # functions of the step, without state

_MAX_PARTS = 64  # of an evaluation


class Evaluation(NamedTuple):
    """The validation loss."""

    loss: float  # nats per token
    bits_per_byte: float
    standard_error: float | None  # bits per byte, from the parts; None: a single part
    parts: list[float]  # nats per token of up to 64 parts of the text, to compare evaluations by
    best_logit_scale: float = 1.0  # expected to give the lowest loss


def evaluate(
    loss_module: LossModule,
    batches: Batches,
    *,
    max_tokens: int = ResolvedTrainConfig.eval_tokens,
    logit_scale: float = 1.0,
) -> Evaluation:
    """Predict each held-out target token once, with logits times `logit_scale`; ranks share the
    windows.

    If there are more than `max_tokens`, only windows spread evenly over the text are predicted.
    """
    bytes_per_token = batches.val_bytes / batches.val.n_targets
    windows = shard_windows(batches.val_windows(max_tokens))
    local = window_losses(loss_module, windows, logit_scale)
    rounds = zip_longest(*distributed.all_gather(local), fillvalue=[])
    losses = [group for groups in rounds for group in groups]
    return _summarize(losses, bytes_per_token, logit_scale)


def evaluate_alone(
    model: Transformer, batches: Batches, *, max_tokens: int = sys.maxsize
) -> Evaluation:
    """Predict each held-out target token once, by default all of them, on this rank."""
    windows = ((group, True) for group in batches.val_windows(max_tokens))
    losses = window_losses(LossModule(model), windows)
    return _summarize(losses, batches.val_bytes / batches.val.n_targets)


def tokens_for_error(parts: Sequence[float], n_tokens: int, relative_error: float) -> int:
    """Return the tokens whose mean loss has this standard error relative to it, judged by the
    losses of `parts` of a text of `n_tokens`; no limit if they are too few to tell, or all 0."""
    if len(parts) < 2 or not any(parts):
        return sys.maxsize
    error = statistics.stdev(parts) / math.sqrt(len(parts)) / statistics.fmean(parts)
    return math.ceil(n_tokens * (error / relative_error) ** 2)


def _summarize(
    groups: list[list[WindowLoss]], bytes_per_token: float, logit_scale: float = 1.0
) -> Evaluation:
    losses = [window for group in groups for window in group]
    if not losses:  # the text is too short for one window
        return Evaluation(0.0, 0.0, None, [], logit_scale)
    nats, first, second, _, n_tokens = np.array(losses).T
    loss = float(nats.sum() / n_tokens.sum())
    bits_per_nat = 1 / math.log(2) / bytes_per_token
    # Neighboring windows are similar, so that single windows would make the error too small.
    n_parts = min(len(nats), _MAX_PARTS)
    part_nats, part_tokens = (
        np.array([part.sum() for part in np.array_split(values, n_parts)])
        for values in (nats, n_tokens)
    )
    error = bits_per_byte_error(part_nats, part_tokens * bytes_per_token)
    parts = [float(nats) for nats in part_nats / part_tokens]
    return Evaluation(
        loss,
        loss * bits_per_nat,
        error if math.isfinite(error) else None,
        parts,
        next_scale(logit_scale, first.sum(), second.sum()),
    )


def evaluate_train(model: Transformer, batches: Batches, *, max_tokens: int) -> float:
    """Return the loss on training text, nats per token; for a single rank."""
    windows = ((group, True) for group in batches.train_windows(max_tokens))
    losses = np.concatenate([np.zeros((0, 5)), *window_losses(LossModule(model), windows)])
    return float(losses[:, 0].sum() / max(1.0, losses[:, -1].sum()))


def shard_windows(windows: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield every W-th group for each of W ranks, and whether it counts.

    All ranks get equally many, since ranks that share a model compute at the same time.
    """
    rank, n_ranks, *_ = distributed.ranks()
    while groups := list(islice(windows, n_ranks)):
        yield groups[min(rank, len(groups) - 1)], rank < len(groups)


@torch.no_grad()
def window_losses(
    loss_module: LossModule, groups: Iterable[tuple[Batch, bool]], logit_scale: float = 1.0
) -> list[list[WindowLoss]]:
    """Return the losses of each window, for groups that count."""
    device = loss_module.model.token_embedding.weight.device
    loss_module.eval()
    results = []
    for group, counts in groups:
        batch = to_device(group, device)
        sums = loss_module(batch, per_window=True, logit_scale=logit_scale)
        if counts:
            tokens, mask, _ = group
            n = [tokens.shape[1] - 1] * len(tokens) if mask is None else mask.sum(1).tolist()
            results.append((sums, n))
    return [
        [(*window, count) for window, count in zip(sums.tolist(), n, strict=True)]
        for sums, n in results
    ]
