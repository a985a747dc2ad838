"""The optimizers: Muon and AdamW.

Muon (Jordan et al. 2024) updates the matrices inside the blocks: momentum, then the nearest
orthogonal matrix by Newton-Schulz iterations, so that every direction of the update has the same
size. AdamW (Loshchilov & Hutter 2019) updates embeddings, norms and biases.

They do not subclass torch's, which import its compiler: that takes as long as torch itself.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tgen.config.training import MuonScale, ResolvedTrainConfig
from tgen.lora.layers import LowRankLinear
from tgen.model.precision import must_round, products_are_bfloat16
from tgen.model.transformer import CausalSelfAttention, Transformer
from tgen.planning.costs import MUON_ITERATIONS

# Quintic of Muon's authors: moves singular values from (0, 1] near 1 in five iterations.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ADAMW_RMS = 0.2  # of AdamW's updates, measured by Moonlight's authors (Liu et al. 2025)
_IGNORE_FOUND_INF = {"mps"}  # devices whose fused AdamW ignores it in some versions of torch

RowSizes = tuple[int, ...]  # of the parts of a matrix that are orthogonalized separately
Orthogonalize = Callable[[Tensor, RowSizes], Tensor]  # (N, m, n) -> (N, m, n)


class AdamW:
    """Torch's fused AdamW."""

    def __init__(self, groups: list[dict[str, Any]], *, beta1: float, beta2: float) -> None:
        self.param_groups = groups  # each with params, lr and weight_decay
        self.beta1, self.beta2 = beta1, beta2
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None) -> None:
        """Update every parameter that has a gradient; nothing if `found_inf` () is 1, a decision
        that stays on the device."""
        for group in self.param_groups:
            trainable: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            for parameter in trainable:
                if parameter not in self.state:
                    self.state[parameter] = {
                        "step": torch.zeros((), device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            states = [self.state[parameter] for parameter in trainable]
            changed = [tensor for state in states for tensor in state.values()] + trainable
            restores = found_inf is not None and found_inf.device.type in _IGNORE_FOUND_INF
            before = [tensor.clone() for tensor in changed] if restores else []
            adamw(
                trainable,
                [p.grad for p in trainable if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=1e-8,
                maximize=False,
            )
            if restores:
                assert found_inf is not None
                for tensor, old in zip(changed, before, strict=True):
                    tensor.copy_(old.where(found_inf != 0, tensor))


class Muon:
    """Orthogonalized momentum; matrices of one shape are computed in one batch."""

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, RowSizes],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        scale: MuonScale = "spectral",
        orthogonalize: Orthogonalize,
    ) -> None:
        """`scale` "adamw" gives an update the RMS of AdamW's, 0.2, times the learning rate."""
        self._scale = scale
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [{"params": [*parameters], **settings}]
        self._row_sizes = parameters
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None) -> None:
        """Update every matrix from its gradient; `found_inf` as in AdamW."""
        for group in self.param_groups:
            device = group["params"][0].device
            finite = torch.tensor(True, device=device) if found_inf is None else found_inf == 0
            alike: dict[tuple[torch.Size, RowSizes], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                alike[parameter.shape, self._row_sizes[parameter]].append(parameter)
            for (_, row_sizes), parameters in alike.items():
                updates = []
                for parameter in parameters:
                    if parameter not in self.state:
                        self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
                    state = self.state[parameter]
                    gradient = parameter.grad
                    assert gradient is not None
                    gradient = gradient.where(finite, state["momentum"])
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(state["momentum"], group["momentum"]))  # Nesterov
                orthogonal = self._orthogonalize(torch.stack(updates), row_sizes)
                rate = group["lr"] * finite
                if self._scale == "adamw":  # 0.2 sqrt(max(m, n)), with the factor of the parts
                    rate = rate * _ADAMW_RMS * parameters[0].shape[1] ** 0.5
                decay = 1 - group["lr"] * finite * group["weight_decay"]
                for parameter, update in zip(parameters, orthogonal, strict=True):
                    parameter.mul_(decay)
                    parameter.sub_(update * rate)


def orthogonalize_parts(x: Tensor, row_sizes: RowSizes) -> Tensor:
    """Orthogonalize the parts of each matrix (N, m, n), which have `row_sizes` rows, separately,
    with the same RMS per row for all shapes."""
    parts = [x] if len(row_sizes) == 1 else list(x.split_with_sizes(row_sizes, 1))
    n_columns = x.shape[2]
    if len(set(row_sizes)) == 1:
        rows = orthogonalize(torch.cat(parts)) * max(1.0, row_sizes[0] / n_columns) ** 0.5
        return torch.cat(rows.chunk(len(parts)), 1)
    scaled = [orthogonalize(p) * max(1.0, p.shape[1] / n_columns) ** 0.5 for p in parts]
    return torch.cat(scaled, 1)


def orthogonalize(x: Tensor) -> Tensor:
    """Move the singular values of each matrix (N, m, n) close to 1 by Newton-Schulz iterations."""
    tall, dtype = x.shape[1] > x.shape[2], x.dtype
    x = x.mT if tall else x
    if must_round(x) or (x.is_cuda and products_are_bfloat16()):
        x = x.bfloat16()  # as in Muon's first implementation
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C) @ x
    return (x.mT if tall else x).to(dtype)


def make_optimizers(
    model: Transformer,
    config: ResolvedTrainConfig,
    *,
    orthogonalize: Orthogonalize = orthogonalize_parts,
) -> list[AdamW | Muon]:
    """Return Muon for the matrices of the blocks and AdamW for the rest; only matrices decay."""
    inside = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    matrices = [p for p in model.parameters() if id(p) in inside]
    tables = [p for p in model.parameters() if p.dim() == 2 and id(p) not in inside]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    embedding = model.token_embedding.weight
    untied = [] if model.config.tied_embeddings else [p for p in tables if p is embedding]
    others = [p for p in tables if not untied or p is not embedding]
    if config.optimizer == "adamw":
        others += matrices
    rates = [
        (others, config.learning_rate, config.weight_decay),
        (vectors, config.learning_rate, 0.0),
        (untied, config.embedding_learning_rate, config.weight_decay),
    ]
    groups = [
        {"params": params, "lr": rate, "weight_decay": decay}
        for params, rate, decay in rates
        if params
    ]
    rest = [AdamW(groups, beta1=config.beta1, beta2=config.beta2)] if groups else []
    if config.optimizer == "adamw":
        return [*rest]
    row_sizes: dict[nn.Parameter, RowSizes] = {matrix: (matrix.shape[0],) for matrix in matrices}
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            row_sizes[module.a] = tuple(part.rank for part in module.rows)
        elif config.separate_qkv and isinstance(module, CausalSelfAttention):
            weight = module.qkv_proj.weight
            if isinstance(weight, nn.Parameter):
                row_sizes[weight] = tuple(module.sizes)
    muon = Muon(
        row_sizes,
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        scale=config.muon_scale,
        orthogonalize=orthogonalize,
    )
    return [muon, *rest]
