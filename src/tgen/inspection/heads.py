"""Metrics of each attention head: entropy, distance, previous-token and induction scores.

Induction scores measure attention in repeated random text, compared with a control.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tgen.inspection.ablation import Ablation
from tgen.inspection.attention import AttentionRecorder
from tgen.inspection.hooks import token_batch, token_losses
from tgen.model.attention import causal_mask
from tgen.model.transformer import Transformer
from tgen.reports.inspection import ROLE_THRESHOLD, HeadReport, HeadsReport

_MAX_BLOCK, _MIN_BLOCK = 50, 4  # tokens; shorter blocks are too short to measure
_N_SEEDS = 8
# Fields of HeadReport that `RepeatScores.head_scores` returns.
SCORES = ("duplicate", "duplicate_control", "induction", "induction_control", "induction_std")
_METRICS = (
    "entropy",
    "effective_keys",
    "normalized_entropy",
    "confidence",
    "distance",
    "self",
    "previous",
    "first",
    "text_induction",
)
_QUERY_CHUNK = 128  # queries at a time: bounds the memory of long texts


@dataclass(frozen=True, kw_only=True)
class RepeatScores:
    """Scores (seeds, L, H) in repeated text and in a control without repetition."""

    block_length: int
    prefix_length: int  # tokens before the first block
    n_seeds: int
    duplicate: tuple[Tensor, Tensor]  # repeated, control
    induction: tuple[Tensor, Tensor]
    gain: float  # loss of the control's second block minus that of the copy, nats per token
    same_tokens: bool  # whether the control's second block reorders the first one's tokens

    def head_scores(self, layer: int, head: int) -> dict[str, float]:
        """Return one head's means over the random texts, by name."""
        means = [float(x[:, layer, head].mean()) for x in (*self.duplicate, *self.induction)]
        std = float(self.induction[0][:, layer, head].std())
        return dict(zip(SCORES, [*means, std], strict=True))


@torch.no_grad()
def score_repeats(
    model: Transformer, candidates: Sequence[int], prefix: Sequence[int]
) -> RepeatScores | None:
    """Run the model on a prefix and two equal blocks of random tokens; in the control the blocks
    differ. No token occurs twice in a block.

    Duplicate: the weight of a second-block token on its copy in the first block. Induction: its
    weight on the token after that copy (Olsson et al. 2022). A sliding window must reach the copy.
    Returns None if the context, the window or the vocabulary is too small.
    """
    config = model.config
    n = min(_MAX_BLOCK, len(candidates), (config.context_length - len(prefix)) // 2)
    windows = (config.window(layer) for layer in range(config.n_layers))
    n = min([n, *(window - 1 for window in windows if window is not None)])
    if n < _MIN_BLOCK:
        return None
    repeated, control = [], []
    for seed in range(_N_SEEDS):
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        shuffled = [candidates[i] for i in order.tolist()]
        block, other = shuffled[:n], shuffled[n : 2 * n]
        if len(other) < n:
            other = _derange(block, seed=_N_SEEDS + seed)
        repeated.append([*prefix, *block, *block])
        control.append([*prefix, *block, *other])
    second = len(prefix) + n  # where the second block starts
    duplicate, induction, x = _second_block_scores(model, repeated, second, n)
    duplicate_control, induction_control, x_control = _second_block_scores(
        model, control, second, n
    )
    gains = []
    for i in range(_N_SEEDS):
        copy_loss = token_losses(model, x[i : i + 1], repeated[i])[second:]
        control_loss = token_losses(model, x_control[i : i + 1], control[i])[second:]
        gains.append(float((control_loss - copy_loss).mean()))
    return RepeatScores(
        block_length=n,
        prefix_length=len(prefix),
        n_seeds=_N_SEEDS,
        duplicate=(duplicate, duplicate_control),
        induction=(induction, induction_control),
        gain=sum(gains) / len(gains),
        same_tokens=len(candidates) < 2 * n,
    )


def _derange(block: list[int], *, seed: int) -> list[int]:
    """Return the block in an order that leaves no token at its position."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(block), generator=generator).tolist()
        if all(i != j for i, j in enumerate(order)):
            return [block[i] for i in order]


def _second_block_scores(
    model: Transformer, sequences: Sequence[Sequence[int]], second: int, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean weights (seeds, L, H) of queries from `second` on, n and n - 1 tokens back;
    and the final vectors (seeds, T, C)."""
    shape = len(sequences), model.config.n_layers, model.config.n_heads
    duplicate, induction = torch.zeros(shape), torch.zeros(shape)

    def add(layer: int, first: int, weights: Tensor) -> None:
        skip = max(0, second - first)
        queries = weights[:, :, skip:].cpu()
        for sums, distance in ((duplicate, n), (induction, n - 1)):
            diagonal = queries.diagonal(offset=first + skip - distance, dim1=2, dim2=3)
            sums[:, layer] += diagonal[..., : queries.shape[2]].sum(dim=-1) / n

    recorder = AttentionRecorder(add, scale=model.config.score_scale)
    x = model.hidden_states(token_batch(model, sequences), recorder=recorder)
    return duplicate, induction, x


class HeadMetricSums:
    """Sums of each metric over the queries of a text, for every layer and head (L, H)."""

    def __init__(self, windows: Sequence[int | None], n_heads: int, ids: Sequence[int]) -> None:
        """`windows` are those of the layers: see `ModelConfig.window`."""
        self._ids = torch.tensor(list(ids))
        self._max_visible = [len(ids) if window is None else window for window in windows]
        shape = len(windows), n_heads
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name in _METRICS}
        n_bins = 1 + max(1, len(ids) - 1).bit_length()  # 0, 1, 2-3, 4-7, ... tokens back
        self.by_distance = torch.zeros(*shape, n_bins, dtype=torch.float64)
        self.n_queries = len(ids) - 1  # without the first
        self.n_with_repeat = [0] * len(windows)

    def __call__(self, layer: int, first: int, weights: Tensor) -> None:
        """Add the weights (1, H, n, S) of the queries from `first` on."""
        weights = weights[0].cpu()
        n, n_keys = weights.shape[-2:]
        keys = torch.arange(n_keys)
        queries = torch.arange(first, first + n)
        self.sums["first"][layer] += weights[..., 0].double().sum(dim=-1)
        skip = 1 if first == 0 else 0  # the first query sees only itself, whatever the head does
        weights, queries = weights[:, skip:], queries[skip:]
        distance = queries[:, None] - keys  # (n, S) tokens from the query back to the key
        n_visible = (queries + 1.0).clamp_max(self._max_visible[layer])
        entropy = -torch.xlogy(weights, weights).sum(dim=-1)  # (H, n)
        metrics = {
            "entropy": entropy,
            "effective_keys": entropy.exp(),
            "normalized_entropy": entropy / n_visible.log().clamp_min(1e-30),
            "confidence": weights.amax(dim=-1),
            "distance": (weights * distance.clamp_min(0)).sum(dim=-1),
            "self": weights.diagonal(offset=first + skip, dim1=1, dim2=2),
            "previous": weights.diagonal(offset=first + skip - 1, dim1=1, dim2=2),
        }
        after_copy = torch.zeros(len(queries), n_keys, dtype=torch.bool)
        after_copy[:, 1:] = self._ids[queries, None] == self._ids[: n_keys - 1]
        after_copy &= (distance >= 0) & (distance < self._max_visible[layer])
        metrics["text_induction"] = (weights * after_copy).sum(dim=-1)
        for name, values in metrics.items():
            self.sums[name][layer] += values.double().sum(dim=-1)
        bins = torch.frexp(distance.clamp_min(0).float()).exponent  # 0 for 0, 1 for 1, 2 for 2-3
        self.by_distance[layer].index_add_(1, bins.flatten(), weights.flatten(1).double())
        self.n_with_repeat[layer] += int(after_copy.any(dim=-1).sum())

    def mean(self, name: str, layer: int, head: int) -> float:
        """Return a metric's mean over the queries that count for it."""
        counts = {"first": self.n_queries + 1, "text_induction": self.n_with_repeat[layer]}
        return float(self.sums[name][layer, head]) / max(counts.get(name, self.n_queries), 1)


@torch.no_grad()
def measure_heads(
    model: Transformer,
    ids: Sequence[int],
    *,
    candidates: Sequence[int],
    sampled_from: str = "",
    prefix: Sequence[int] = (),
    ablation: Ablation | None = None,
) -> tuple[HeadsReport, AttentionRecorder]:
    """Return the metrics of every head over a text of at least one token, and the recorder.

    Random text is sampled from the ids `candidates`, which `sampled_from` describes, and begins
    with `prefix`.
    """
    config = model.config
    windows = [config.window(layer) for layer in range(config.n_layers)]
    sums = HeadMetricSums(windows, config.n_heads, ids)
    recorder = AttentionRecorder(sums, scale=config.score_scale)
    model.hidden_states(token_batch(model, [ids]), recorder=recorder)
    repeats = score_repeats(model, candidates, prefix)
    baseline = _uniform_baseline(ids, repeats, None)
    window = next((window for window in windows if window is not None), None)
    window_baseline = _uniform_baseline(ids, repeats, window)
    group_size = config.n_heads // config.n_kv_heads
    heads = []
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            metrics: dict[str, Any] = {name: sums.mean(name, layer, head) for name in _METRICS}
            metrics |= repeats.head_scores(layer, head) if repeats else dict.fromkeys(SCORES)
            if not sums.n_with_repeat[layer]:
                metrics["text_induction"] = None
            histogram = sums.by_distance[layer, head]
            report = HeadReport(
                layer=layer,
                head=head,
                kv_head=head // group_size,
                window=windows[layer],
                role="",
                distance_histogram=(histogram / histogram.sum().clamp_min(1e-12)).tolist(),
                ablation_cost=None if ablation is None else ablation.costs[layer][head],
                **metrics,
            )
            own_baseline = baseline if windows[layer] is None else window_baseline
            heads.append(replace(report, role=_role(report, own_baseline)))
    report_of_all = HeadsReport(
        heads=heads,
        baseline=baseline,
        window_baseline=None if window_baseline == baseline else window_baseline,
        n_queries=sums.n_queries,
        block_length=repeats.block_length if repeats else 0,
        n_seeds=repeats.n_seeds if repeats else 0,
        sampled_from=sampled_from,
        same_tokens=repeats is not None and repeats.same_tokens,
        repeat_gain=repeats.gain if repeats else None,
        loss=None if ablation is None else ablation.loss,
    )
    return report_of_all, recorder


def attention_shift(a: HeadReport, b: HeadReport) -> float:
    """Return the share of attention that lies at another distance in `b` than in `a`."""
    pairs = zip(a.distance_histogram, b.distance_histogram, strict=True)
    return sum(abs(x - y) for x, y in pairs) / 2


def _uniform_baseline(
    ids: Sequence[int], repeats: RepeatScores | None, window: int | None
) -> dict[str, float]:
    """Return the metrics of uniform attention over the keys that a window leaves visible."""
    sums = HeadMetricSums([window], 1, ids)
    for first in range(0, len(ids), _QUERY_CHUNK):
        n_keys = min(first + _QUERY_CHUNK, len(ids))
        visible = causal_mask(torch.arange(first, n_keys), n_keys, window)
        sums(0, first, visible[None, None] / visible.sum(dim=-1, keepdim=True))
    baseline = {name: sums.mean(name, 0, 0) for name in _METRICS}
    if not sums.n_with_repeat[0]:
        del baseline["text_induction"]
    if repeats is not None:
        start = repeats.prefix_length + repeats.block_length
        second_block = range(start, start + repeats.block_length)
        baseline["duplicate"] = baseline["induction"] = fmean(
            1 / min(t + 1, window or t + 1) for t in second_block
        )
    return baseline


def _role(report: HeadReport, baseline: dict[str, float]) -> str:
    """Return the score furthest above its baseline or control, or "" if none is clearly above."""
    excess = {
        "previous": report.previous - baseline["previous"],
        "self": report.self - baseline["self"],
        "first": report.first - baseline["first"],
    }
    if report.induction is not None and report.induction_control is not None:
        excess["induction"] = report.induction - report.induction_control
    if report.duplicate is not None and report.duplicate_control is not None:
        excess["duplicate"] = report.duplicate - report.duplicate_control
    role, score = max(excess.items(), key=lambda pair: pair[1])
    return role if score > ROLE_THRESHOLD else ""
