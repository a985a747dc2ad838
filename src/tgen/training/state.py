"""The training state, from which a run resumes exactly: weights, optimizer moments and counters.

There is no random state: batches and dropout are functions of the seed, the step and the row.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tgen import distributed
from tgen.config import ModelConfig
from tgen.config.training import SHARDED, Parallel, ResolvedTrainConfig
from tgen.lora import layers
from tgen.lora.layers import frozen_transformer
from tgen.lora.matrices import NewAdapter, parameter_shapes
from tgen.model.transformer import Transformer
from tgen.training.bigram_start import start_from_bigrams
from tgen.training.loss import LossModule
from tgen.training.optimizers import Orthogonalize, make_optimizers, orthogonalize_parts


@dataclass
class Progress:
    """The counters of a run: plain numbers, saved as JSON."""

    step: int = 0
    windows: int = 0  # trained on up to `step`; batch_size may change
    steps_taken: int = 0  # including steps that a rollback discarded
    seconds: float = 0.0  # spent on the run, over all sessions
    setup_seconds: float = 0.0  # part of `seconds` before the first step
    decay_start: int | None = None  # reset by early stopping and by another end
    total_steps: int | None = None
    # Each time the clock set these two: the step, `decay_start` and `total_steps`
    end_history: list[list[int]] = field(default_factory=list)
    ends_to_repeat: list[list[int]] = field(default_factory=list)  # history of another run
    end_changes: int = 0  # how often the end had been overridden when these two were chosen
    best_step: int = 0
    best_bits_per_byte: float | None = None
    best_parts: list[float] = field(default_factory=list)  # see `Evaluation`
    last_bits_per_byte: float | None = None
    logit_scale: float = 1.0  # of the last evaluation, and of weights that are saved after it
    next_logit_scale: float = 1.0  # of the next evaluation
    corpus_changes: int = 0  # how often the corpus had changed when the best was evaluated
    worse_evals: int = 0  # in a row, each worse than the one before; see early_stopping
    evaluated_in_decay: bool = False
    restore_best: bool = False  # the best checkpoint is to be restored: see early_stopping
    stopped_early: bool = False
    most_exact: int = 0  # answers, in an evaluation
    exact_evals: int = 0  # in a row that reproduced every answer: see early_stopping
    closing_seconds: float = 0.0  # expected after the last step
    planned_step_seconds: float = 0.0  # if slower, the closing is, too; 0: not compared
    evaluation_seconds: float = 0.0  # duration of the last evaluation, with saving and sampling
    saving_seconds: float = 0.0  # duration of the last save in the background
    skipped_steps: int = 0  # without effect, because loss or gradient was not finite
    consecutive_skips: int = 0
    n_divergences: int = 0  # rollbacks because of divergence
    n_rollbacks: int = 0  # for any reason
    learning_rate_scale: float = 1.0  # halved after each divergence


_CPU = torch.device("cpu")
_WEIGHTS = "model/"  # prefix of weights in `own_arrays`; moments have their key as prefix


class TrainState:
    """A model in training, its optimizers and its counters.

    With `parallel` all ranks have a part of it, and all call the same methods. If they shard
    it, the model is on the meta device, and its weights are arbitrary until `restore`.
    """

    def __init__(
        self,
        model: Transformer,
        config: ResolvedTrainConfig,
        *,
        device: torch.device = _CPU,
        parallel: Parallel | None = None,
    ) -> None:
        if parallel not in SHARDED:
            model = model.to(device)
        self.model, self.parallel = model, parallel
        self.loss_module = LossModule(
            model,
            precision=config.precision,
            compiled=config.compile,
            consistency=config.consistency if config.passes > 1 else 0.0,
        )
        self.step_loss: nn.Module = self.loss_module  # wrapped by DDP or FSDP where ranks share it
        orthogonalize: Orthogonalize = orthogonalize_parts
        if parallel:
            from tgen.training.parallel import (  # seconds to import
                make_mesh,
                one_rank_per_matrix,
                parallelize,
            )

            mesh = make_mesh(device, parallel)
            self.step_loss = parallelize(self.loss_module, parallel, mesh)
            if parallel in SHARDED:  # only now allocate, one shard per rank
                self.step_loss.to_empty(device=device)
                model.make_tables()
                model.to(device)
            orthogonalize = one_rank_per_matrix(orthogonalize_parts, mesh)
        self.optimizers = make_optimizers(model, config, orthogonalize=orthogonalize)
        self.progress = Progress()

    def gradient_sync(self, *, enabled: bool) -> AbstractContextManager[None]:
        """Return a context for a backward pass whose gradients ranks exchange now or, if not
        `enabled`, with a later pass; FSDP always exchanges them now."""
        if enabled or self.parallel != "ddp":
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.step_loss.no_sync()  # type: ignore[operator]
        return no_sync

    def is_finite(self) -> bool:
        """Whether all weights of this rank are finite."""
        return all(bool(local_tensor(p).isfinite().all()) for p in self.model.parameters())

    def whole_model(self) -> Transformer | None:
        """Return a model with all weights on rank 0, None on the others."""
        if self.parallel in SHARDED:
            arrays = self.copy_weights()
            return Transformer.from_arrays(self.model.config, arrays) if arrays else None
        return self.model if distributed.is_rank_zero() else None

    def copy_weights(self) -> dict[str, NDArray[Any]]:
        """Return all weights on rank 0, named as in `Transformer.to_arrays`; none on the others."""
        return {name: array.copy() for name, array in self._whole_weights()}

    def hash_weights(self) -> str:
        """Return the SHA-256 of all weights; all ranks must call this."""
        digest = hashlib.sha256()
        for _, array in self._whole_weights():
            digest.update(np.ascontiguousarray(array).data)
        return str(distributed.broadcast(digest.hexdigest()))

    def _whole_weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the weights on rank 0, gathered one by one; the other ranks iterate, too."""
        for name, parameter in sorted(self.model.named_parameters()):
            full = full_tensor(parameter.detach())
            if distributed.is_rank_zero():
                yield name, full.cpu().numpy()

    def own_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the weights and moments that this rank saves, by name: its rows of those that are
        sharded, in the first replica; all others on rank 0. Those of a state that ranks shard are
        copies; others on a CPU share its memory."""
        own, is_rank_zero = distributed.ranks(), distributed.is_rank_zero()
        copy = self.parallel in SHARDED
        if self.parallel == "hsdp" and own.rank >= own.local_world_size:
            return {}
        return {
            name: local_tensor(tensor.detach()).to("cpu", copy=copy).numpy()
            for name, tensor in self._tensors()
            if is_rank_zero or hasattr(tensor, "to_local")
        }

    def restore(self, arrays: Mapping[str, Any], progress: Progress) -> None:
        """Load what all ranks' `own_arrays` returned, as arrays or slices of files; each rank reads
        only the rows that it stores. Set the counters."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        parameters = dict(self.model.named_parameters())
        owner = {
            parameter: optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        if self.parallel in SHARDED:
            from tgen.training.parallel import own_rows, shard_like  # seconds to import
        for path, array in arrays.items():
            key, name = path.split("/", 1)
            parameter = parameters[name]
            is_sharded = self.parallel in SHARDED and array.shape == parameter.shape
            rows = own_rows(parameter) if is_sharded else ...
            tensor = torch.from_numpy(array[rows]).to(parameter.device)
            if path.startswith(_WEIGHTS):
                local_tensor(parameter.detach()).copy_(tensor)
            else:
                moment = shard_like(tensor, parameter) if is_sharded else tensor
                owner[parameter].state.setdefault(parameter, {})[key] = moment
        self.progress = progress

    @property
    def n_bytes(self) -> int:
        """Size of all ranks' `own_arrays`."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield _WEIGHTS + name, parameter
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{key}/{name}", torch.as_tensor(value)


def new_state(
    model_config: ModelConfig,
    config: ResolvedTrainConfig,
    device: torch.device,
    *,
    weights: Mapping[str, NDArray[Any]] | None = None,
    bigram_counts: NDArray[np.float32] | None = None,
    adapter: NewAdapter | None = None,
    parallel: Parallel | None = None,
    restored: bool = False,
) -> TrainState:
    """Return the state at step 0 with `weights` or, if None, random ones; with `bigram_start` these
    begin with `bigram_counts` (V, V), which only rank 0 has. If the state will be `restored`, its
    weights may be arbitrary.

    Random weights are made on the CPU, so that every device gets the same; those of rank 0 count.
    With an `adapter`, the `weights` are frozen, and the state has the adapter's parameters only.
    """
    if adapter is not None:
        assert weights is not None
        torch.manual_seed(config.seed)
        model = frozen_transformer(model_config, weights, dropout=config.dropout)
        layers.attach(model, adapter.layout, adapter.shapes, seed=config.seed)
        if adapter.pairs:
            layers.load_pairs(model, adapter.layout, adapter.pairs)
    elif parallel == "fsdp":
        with torch.device("meta"):
            model = Transformer(model_config, dropout=config.dropout)
    else:
        model = _first_model(model_config, config, weights, bigram_counts)
    model.activation_checkpointing = config.activation_checkpointing
    state = TrainState(model, config, device=device, parallel=parallel)
    if parallel in SHARDED and not restored:
        from tgen.training.parallel import scatter

        first = {}
        if distributed.is_rank_zero():
            whole = _first_model(model_config, config, weights, bigram_counts)
            first = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            scatter(first.get(name), parameter)
    return state


def _first_model(
    model_config: ModelConfig,
    config: ResolvedTrainConfig,
    weights: Mapping[str, NDArray[Any]] | None,
    bigram_counts: NDArray[np.float32] | None,
) -> Transformer:
    torch.manual_seed(config.seed)
    model = Transformer(model_config, dropout=config.dropout)
    if weights is None and config.bigram_start and bigram_counts is not None:
        weights = start_from_bigrams(model.to_arrays(), bigram_counts, seed=config.seed)
    if weights is not None:
        model.load_arrays(weights)
    return model


def fits_model(
    arrays: Mapping[str, Any],
    config: ModelConfig,
    optimizer: str,
    adapter: NewAdapter | None = None,
) -> bool:
    """Whether `TrainState.restore` accepts these for this model; allocates and reads nothing."""
    if config.n_layers > len(arrays):  # do not build billions of layers
        return False
    parameters: Mapping[str, tuple[int, ...]]
    if adapter is not None:
        parameters = parameter_shapes(adapter.layout, adapter.shapes)
    else:
        try:
            with torch.device("meta"):
                model = Transformer(config)
        except RuntimeError:  # a size beyond 64 bits
            return False
        parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shapes = {path: array.shape for path, array in arrays.items()}
    for name, shape in parameters.items():
        is_muon = optimizer == "muon" and len(shape) == 2 and name.startswith("blocks.")
        moments = {"momentum": shape}
        if not is_muon:
            moments = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        found = {key: shapes.pop(f"{key}/{name}", None) for key in moments}
        if shapes.pop(_WEIGHTS + name, None) != shape or found not in (
            moments,
            dict.fromkeys(moments),  # before the first step
        ):
            return False
    return not shapes and all(array.dtype == np.float32 for array in arrays.values())


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor if ranks hold shards of it; then all ranks must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
