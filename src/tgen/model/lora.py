"""Attach low-rank adapters to a frozen transformer, and read and load their pairs."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from tgen.model.frozen import FrozenLinear
from tgen.model.lora_layout import Layout, Pair, Part, Shape, sample_a
from tgen.model.low_rank import LowRankLinear, Rows
from tgen.model.transformer import Transformer


def attach(model: Transformer, layout: Layout, shapes: Mapping[str, Shape], *, seed: int) -> None:
    """Replace the frozen matrices that `shapes` has pairs for; the logits do not change, because
    every B is zero. Matrices that are parts of one of transformers' share its A."""
    shared: dict[tuple[str, ...], nn.Parameter] = {}
    for name, parts, linear in _adapted(model, layout, shapes):
        assert isinstance(linear, FrozenLinear), name
        key = tuple(part.pair for part in parts)
        if key not in shared:
            a = [sample_a(p.pair, shapes[p.pair].rank, p.n_inputs, seed) for p in parts]
            shared[key] = nn.Parameter(torch.from_numpy(np.concatenate(a)))
        b = [nn.Parameter(torch.zeros(p.n_rows, shapes[p.pair].rank)) for p in parts]
        rows = [Rows(p.start, p.n_rows, *shapes[p.pair]) for p in parts]
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        module = LowRankLinear(linear, rows, shared[key], b)
        setattr(model.get_submodule(parent), last, module)


def pairs_of(model: Transformer, layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, Pair]:
    """Return copies of the pairs of a model on the CPU; DTensors are not supported."""
    pairs: dict[str, Pair] = {}
    for name, parts, linear in _adapted(model, layout, shapes):
        assert isinstance(linear, LowRankLinear), name
        a = linear.a.detach().cpu().numpy()
        column = 0
        for part, b in zip(parts, linear.b, strict=True):
            rank, scale = shapes[part.pair]
            if part.pair not in pairs:
                whole = np.empty((part.pair_rows, rank), np.float32)
                pairs[part.pair] = Pair(a[column : column + rank].copy(), whole, scale)
            target = pairs[part.pair].b[part.pair_start : part.pair_start + part.n_rows]
            target[:] = b.detach().cpu().numpy()
            column += rank
    return pairs


def load_pairs(model: Transformer, layout: Layout, pairs: Mapping[str, Pair]) -> None:
    """Copy pairs into the parameters of `attach`, with B for the scales of those."""
    shapes = {name: Shape(len(pair.a), pair.scale) for name, pair in pairs.items()}
    with torch.no_grad():
        for name, parts, linear in _adapted(model, layout, shapes):
            assert isinstance(linear, LowRankLinear), name
            a = np.concatenate([pairs[part.pair].a for part in parts])
            linear.a.copy_(torch.from_numpy(a))
            for part, rows, b in zip(parts, linear.rows, linear.b, strict=True):
                pair = pairs[part.pair]
                own = pair.b[part.pair_start : part.pair_start + part.n_rows]
                b.copy_(torch.from_numpy(own * np.float32(pair.scale / rows.scale)))


def _adapted(
    model: Transformer, layout: Layout, shapes: Mapping[str, Shape]
) -> list[tuple[str, list[Part], FrozenLinear | LowRankLinear]]:
    """Return the matrices with pairs: their name, the parts with a pair, and the layer."""
    found = []
    for name, every in layout.items():
        if parts := [part for part in every if part.pair in shapes]:
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, FrozenLinear | LowRankLinear), name
            found.append((name, parts, linear))
    return found
