"""Answers that a model has memorized: greedy decoding reproduces them exactly."""

import sys
from itertools import islice

from tgen import distributed
from tgen.training.evaluation import Batches, shard_windows, window_losses
from tgen.training.loss import LossModule


def count_exact(loss_module: LossModule, rows: Batches, *, max_tokens: int) -> tuple[int, int]:
    """Return how many of the training rows, one per window, greedy decoding reproduces, and how
    many were evaluated; ranks share them.

    After `max_tokens`, the first batch with a wrong row is the last that is evaluated.
    """
    n_exact = n_rows = n_tokens = 0
    windows = shard_windows(rows.train_windows(sys.maxsize))
    while groups := list(islice(windows, 1)):
        local = window_losses(loss_module, groups)
        losses = [
            loss for part in distributed.all_gather(local) for group in part for loss in group
        ]
        n_exact += sum(misses == 0 for *_, misses, _ in losses)
        n_rows += len(losses)
        n_tokens += sum(n for *_, n in losses)
        if n_tokens >= max_tokens and n_exact < n_rows:
            break
    return n_exact, n_rows
