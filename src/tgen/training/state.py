"""All that a run needs to go on exactly: weights, optimizer moments and a few counters.

There is no random state: batches and dropout are functions of the seed, the step and the row.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tgen import distributed
from tgen.config import ModelConfig, Parallel, TrainConfig
from tgen.model.transformer import Transformer
from tgen.training.evaluation import LossModule
from tgen.training.optimizers import Orthogonalize, make_optimizers, orthogonalize


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
    corpus_changes: int = 0  # of which corpus the best is: it may change on the way
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


_CPU = torch.device("cpu")
_WEIGHTS = "model/"  # what their names begin with in `to_arrays`; those of moments with a key


class TrainState:
    """A model in training with its optimizers and counters; with `parallel` one that all ranks
    have a part in: they call its methods alike."""

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        *,
        device: torch.device = _CPU,
        parallel: Parallel | None = None,
    ) -> None:
        if parallel != "fsdp":  # of which a device takes a share at a time
            model = model.to(device)
        self.model, self.parallel = model, parallel
        self.learner = LossModule(model, compiled=config.compile)
        self.step_loss: nn.Module = self.learner  # what a step calls
        way: Orthogonalize = orthogonalize
        if parallel:
            from tgen.training.parallel import (  # seconds to import
                all_ranks,
                one_rank_per_matrix,
                parallelize,
            )

            mesh = all_ranks(device)
            self.step_loss = parallelize(self.learner, parallel, mesh)
            way = one_rank_per_matrix(orthogonalize, mesh)
        self.optimizers = make_optimizers(model, config, orthogonalise=way)
        self.progress = Progress()

    def exchange(self, *, now: bool) -> AbstractContextManager[None]:
        """Around a backward pass: whether the ranks exchange its gradients now, or with the next
        one's; where they share the weights too, always now."""
        if now or self.parallel != "ddp":
            return nullcontext()
        later: AbstractContextManager[None] = self.step_loss.no_sync()  # type: ignore[operator]
        return later

    def is_finite(self) -> bool:
        """Whether all weights that this rank has are."""
        return all(bool(local_tensor(p).isfinite().all()) for p in self.model.parameters())

    def whole_model(self) -> Transformer | None:
        """A model with all weights, to write with or to look at; on rank 0 alone."""
        if self.parallel == "fsdp":
            arrays = _copies(self.model.named_parameters())
            return Transformer.from_arrays(self.model.config, arrays) if arrays else None
        return self.model if distributed.is_rank_zero() else None

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of weights and moments by name (`weights_of`); on rank 0 alone."""
        return _copies(self._tensors())

    def restore(self, arrays: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Takes over what `to_arrays` gave, from rank 0."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        parameters = dict(self.model.named_parameters())
        owner = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        kinds = {path: (array.shape, array.dtype) for path, array in arrays.items()}
        for path, (shape, dtype) in distributed.broadcast(kinds).items():
            key, name = path.split("/", 1)
            parameter = parameters[name]
            array = arrays[path].copy() if path in arrays else np.empty(shape, dtype)
            tensor = torch.from_numpy(array).to(parameter.device)
            if self.parallel:
                from tgen.training.parallel import broadcast_or_shard

                tensor = broadcast_or_shard(tensor, parameter)
            if path.startswith(_WEIGHTS):
                parameter.data.copy_(tensor)
            else:
                owner[parameter].state.setdefault(parameter, {})[key] = tensor
        self.progress = progress

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield _WEIGHTS + name, parameter
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{key}/{name}", torch.as_tensor(value)


def new_state(
    model_config: ModelConfig,
    config: TrainConfig,
    device: torch.device,
    *,
    weights: Mapping[str, NDArray[Any]] | None = None,
    parallel: Parallel | None = None,
) -> TrainState:
    """A run at its start, with these weights; None: with new ones, drawn on the processor, so that
    every device and rank gets the same."""
    torch.manual_seed(config.seed)
    model = Transformer(model_config, dropout=config.dropout)
    if weights is not None:
        model.load_arrays(weights)
    return TrainState(model, config, device=device, parallel=parallel)


def weights_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Those of `to_arrays` that are weights, as `Transformer.to_arrays` names them."""
    of_model = (name for name in arrays if name.startswith(_WEIGHTS))
    return {name.removeprefix(_WEIGHTS): arrays[name] for name in of_model}


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, of which each rank may have a share: then all ranks call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NDArray[Any]]:
    arrays = {}
    for name, tensor in tensors:
        everything = full_tensor(tensor.detach())
        if distributed.is_rank_zero():
            arrays[name] = everything.cpu().numpy().copy()
    return arrays
