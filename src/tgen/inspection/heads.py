"""What each head does, in numbers with names: sums over the rows of a text."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tgen.inspection.ablation import Ablation
from tgen.inspection.attention import AttentionRecorder, batch_of
from tgen.inspection.repeated_sequences import Repeats, on_repeats
from tgen.model.transformer import Transformer
from tgen.reports import CLEAR, HeadReport, HeadsReport

_SUMMED = (
    "entropy",
    "effective_keys",
    "normalised_entropy",
    "confidence",
    "distance",
    "self",
    "previous",
    "first",
    "text_induction",
)


class HeadSums:
    """Adds up what rows of weights say, for every layer and head (L, H)."""

    def __init__(self, model: Transformer, ids: Sequence[int]) -> None:
        config = model.config
        self._ids = torch.tensor(list(ids))
        self.edges = [0, *(2**i for i in range(max(1, len(ids) - 1).bit_length()))]
        shape = config.n_layers, config.n_heads
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name in _SUMMED}
        self.by_distance = torch.zeros(*shape, len(self.edges), dtype=torch.float64)
        self.n_rows = self.n_answerable = 0
        self._layer = -1

    def __call__(self, layer: int, first: int, weights: Tensor) -> None:
        """(1, H, n, S) weights of the queries from `first` on."""
        weights = weights[0].cpu()
        n, seen = weights.shape[-2:]
        keys = torch.arange(seen)
        queries = torch.arange(first, first + n)
        self.sums["first"][layer] += weights[..., 0].double().sum(dim=-1)
        drop = 1 if first == 0 else 0  # the first query sees itself alone, whatever the head
        weights, queries = weights[:, drop:], queries[drop:]
        back = queries[:, None] - keys  # (n, S) tokens from query to key
        entropy = -torch.xlogy(weights, weights).sum(dim=-1)  # (H, n)
        rows = {
            "entropy": entropy,
            "effective_keys": entropy.exp(),
            "normalised_entropy": entropy / torch.log(queries + 1.0),
            "confidence": weights.amax(dim=-1),
            "distance": (weights * back.clamp_min(0)).sum(dim=-1),
            "self": weights.diagonal(offset=first + drop, dim1=1, dim2=2),
            "previous": weights.diagonal(offset=first + drop - 1, dim1=1, dim2=2),
        }
        follows = torch.zeros(len(queries), seen, dtype=torch.bool)
        follows[:, 1:] = self._ids[queries, None] == self._ids[: seen - 1]
        follows &= back >= 0
        rows["text_induction"] = (weights * follows).sum(dim=-1)
        for name, values in rows.items():
            self.sums[name][layer] += values.double().sum(dim=-1)
        total = weights.cumsum(dim=-1)  # mass on the keys up to each
        within = [  # (H, n) mass at most so many tokens back
            1
            - total.gather(-1, (queries - 1 - far).clamp_min(0).expand(len(total), -1)[..., None])
            .squeeze(-1)
            .where(queries - 1 - far >= 0, 0)
            for far in [0, *(2 * edge - 1 for edge in self.edges[1:])]
        ]
        before = torch.zeros_like(within[0])
        for i, mass in enumerate(within):
            self.by_distance[layer, :, i] += (mass - before).double().sum(dim=-1)
            before = mass
        if self._layer in (-1, layer):  # the rows are the same in every layer
            self._layer = layer
            self.n_rows += len(queries)
            self.n_answerable += int(follows.any(dim=-1).sum())

    def mean(self, name: str, layer: int, head: int) -> float:
        """A sum over what it was taken of."""
        of = {"first": self.n_rows + 1, "text_induction": self.n_answerable}.get(name, self.n_rows)
        return float(self.sums[name][layer, head]) / max(of, 1)


@torch.no_grad()
def heads_of(
    model: Transformer,
    ids: Sequence[int],
    *,
    candidates: Sequence[int],
    drawn_from: str = "",
    start: Sequence[int] = (),
    ablation: Ablation | None = None,
) -> tuple[HeadsReport, AttentionRecorder]:
    """Every head over a text of at least one token, and the recorder that saw it.

    `candidates` are the ids that random text is made of, `drawn_from` the words for them, `start`
    what every such text begins with.
    """
    sums = HeadSums(model, ids)
    recorder = AttentionRecorder(sums)
    model.hidden(batch_of(model, [ids]), recorder=recorder)
    repeats = on_repeats(model, candidates, start)
    baseline = _uniform(ids, repeats)
    config = model.config
    groups = config.n_heads // config.n_kv_heads
    heads = []
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            means: dict[str, Any] = {name: sums.mean(name, layer, head) for name in _SUMMED}
            means |= repeats.scores(layer, head)
            if not sums.n_answerable:
                means["text_induction"] = None
            mass = sums.by_distance[layer, head]
            report = HeadReport(
                layer=layer,
                head=head,
                kv_head=head // groups,
                role="",
                by_distance=(mass / mass.sum().clamp_min(1e-12)).tolist(),
                ablation=None if ablation is None else ablation.cost[layer][head],
                **means,
            )
            heads.append(_with_role(report, baseline))
    whole = HeadsReport(
        heads=heads,
        baseline=baseline,
        n_rows=sums.n_rows,
        block_length=repeats.block_length,
        seeds=repeats.seeds,
        drawn_from=drawn_from,
        same_tokens=repeats.same_tokens,
        repeat_gain=repeats.gain,
        loss=None if ablation is None else ablation.loss,
    )
    return whole, recorder


def attention_shift(a: HeadReport, b: HeadReport) -> float:
    """The share of a head's attention that lies nearer or farther than another's."""
    return sum(abs(x - y) for x, y in zip(a.by_distance, b.by_distance, strict=True)) / 2


def _uniform(ids: Sequence[int], repeats: Repeats) -> dict[str, float]:
    """What a head that looks at all tokens alike would score."""
    T = len(ids)
    seen = [i + 1 for i in range(1, T)] or [1]
    share = fmean(1 / n for n in seen)
    scores = {
        "entropy": fmean(math.log(n) for n in seen),
        "effective_keys": fmean(seen),
        "normalised_entropy": 1.0,
        "confidence": share,
        "distance": fmean((n - 1) / 2 for n in seen),
        "self": share,
        "previous": share,
        "first": fmean(1 / (i + 1) for i in range(T)),
    }
    before: dict[int, int] = {}  # how often a token came
    followed = []  # of each token that came before, the share of what followed it
    for i, token in enumerate(ids):
        if before.get(token):
            followed.append(before[token] / (i + 1))
        before[token] = before.get(token, 0) + 1
    if followed:
        scores["text_induction"] = fmean(followed)
    if repeats.block_length:
        rows = range(repeats.before + repeats.block_length, repeats.n_tokens)
        scores["duplicate"] = scores["induction"] = fmean(1 / (t + 1) for t in rows)
    return scores


def _with_role(report: HeadReport, baseline: dict[str, float]) -> HeadReport:
    """Names the plainest thing that a head does: the score furthest above what would be there
    anyway, if that is far."""
    above = {
        "previous": report.previous - baseline["previous"],
        "self": report.self - baseline["self"],
        "first": report.first - baseline["first"],
    }
    if report.induction is not None and report.induction_control is not None:
        above["induction"] = report.induction - report.induction_control
    if report.duplicate is not None and report.duplicate_control is not None:
        above["duplicate"] = report.duplicate - report.duplicate_control
    role, score = max(above.items(), key=lambda pair: pair[1])
    return replace(report, role=role if score > CLEAR else "")
