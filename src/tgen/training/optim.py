"""The optimizers, and the learning rate as a function of the step.

Matrices inside the blocks go to Muon (Jordan et al. 2024): momentum, then the nearest orthogonal
matrix by Newton-Schulz iterations, so that every direction of the update has the same size. The
embeddings, norms and biases go to AdamW (Loshchilov & Hutter 2019).
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tgen.config import TrainConfig
from tgen.model.transformer import Transformer

# The quintic that Muon's authors chose: singular values from 0 to 1 end near 1 after five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5

Orthogonalise = Callable[[Tensor], Tensor]  # (N, m, n) -> (N, m, n)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape are done in one batch.

    Where the attribute `found_inf` is 1 a step changes nothing, as in torch's fused optimizers: the
    decision stays on the device.
    """

    found_inf: Tensor  # (), 0 or 1

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        orthogonalise: Orthogonalise,
    ) -> None:
        super().__init__(parameters, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self._orthogonalise = orthogonalise
        self.found_inf = torch.zeros((), device=parameters[0].device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every matrix from its gradient."""
        assert closure is None
        sound = self.found_inf == 0
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    gradient = parameter.grad
                    assert gradient is not None
                    gradient = gradient.where(sound, state["momentum"])
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(state["momentum"], group["momentum"]))  # Nesterov
                orthogonal = self._orthogonalise(torch.stack(updates))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5  # tall matrices: the same rms a row
                rate = group["lr"] * sound
                for parameter, update in zip(parameters, orthogonal, strict=True):
                    parameter.mul_(1 - rate * group["weight_decay"])
                    parameter.sub_(update * (rate * scale))


def orthogonalise(x: Tensor) -> Tensor:
    """(N, m, n) -> each matrix with its singular values moved close to 1 (Newton-Schulz)."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = _A * x + torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C) @ x
    return x.mT if tall else x


def make_optimizers(
    model: Transformer, config: TrainConfig, *, orthogonalise: Orthogonalise = orthogonalise
) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest; weight decay on matrices only."""
    inside = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    matrices = [p for p in model.parameters() if id(p) in inside]
    tables = [p for p in model.parameters() if p.dim() == 2 and id(p) not in inside]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [
            {"params": tables, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    if config.optimizer == "adamw":
        adamw.param_groups[0]["params"] += matrices
        return [adamw]
    muon = Muon(
        matrices,
        lr=config.matrix_learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        orthogonalise=orthogonalise,
    )
    return [muon, adamw]


def rate_factor(
    step: int, *, warmup_steps: int, decay_start: int | None, total_steps: int | None
) -> float:
    """What the learning rates are multiplied with at `step`: up, level, and straight down to 0."""
    up = min(1.0, (step + 1) / (warmup_steps + 1))
    if decay_start is None or total_steps is None or step < decay_start:
        return up
    return up * max(0.0, (total_steps - step) / (total_steps - decay_start + 1))
