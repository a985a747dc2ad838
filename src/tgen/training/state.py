"""All that a run needs to go on exactly: weights, optimizer moments and a few counters.

There is no random state: batches and dropout are functions of the seed and the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from tgen.config import ModelConfig, TrainConfig
from tgen.model.transformer import Transformer
from tgen.training.optim import make_optimizers


@dataclass
class Progress:
    """The counters; plain numbers, saved as JSON."""

    step: int = 0
    steps_taken: int = 0  # with those of states that the run went back from
    seconds: float = 0.0  # spent on the run, all sittings together
    setup_seconds: float = 0.0  # of them, before the first step
    decay_start: int | None = None  # once chosen, the schedule is fixed
    total_steps: int | None = None
    end_changes: int = 0  # how often another end had been asked for: of which one these know
    best_step: int = 0
    best_bits_per_byte: float | None = None
    not_better: int = 0  # evaluations since the best, or since the decay began
    in_decay: bool = False  # one has been made there
    go_back: bool = False  # to the best step: the loop has ended there
    stopped_early: bool = False
    closing_seconds: float = 0.0  # expected for what comes after the last step
    evaluation_seconds: float = 0.0  # the newest evaluation took, saving and sampling included
    skipped: int = 0  # steps without effect: something was not finite
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    ways_back: int = 0  # taken so far, for whatever reason
    rate_scale: float = 1.0  # halved by each rollback


class TrainState:
    """A model in training with its optimizers and counters."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        self.model = model
        self.optimizers = make_optimizers(model, config)
        self.progress = Progress()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Weights and moments by name, as copies."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, parameter in self.model.named_parameters():
            arrays[f"model/{name}"] = _copy(parameter)
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    arrays[f"{key}/{name}"] = _copy(torch.as_tensor(value))
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Takes over what `to_arrays` gave."""
        parameters = dict(self.model.named_parameters())
        owner = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for path, array in arrays.items():
            key, name = path.split("/", 1)
            parameter = parameters[name]
            tensor = torch.from_numpy(array.copy()).to(parameter.device)
            if key == "model":
                parameter.data.copy_(tensor)
            else:
                owner[parameter].state[parameter][key] = tensor
        self.progress = progress


def new_state(model_config: ModelConfig, config: TrainConfig, device: torch.device) -> TrainState:
    """A run at its start: weights drawn on the processor, so that every device gets the same."""
    torch.manual_seed(config.seed)
    return TrainState(Transformer(model_config, dropout=config.dropout).to(device), config)


def _copy(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array
