"""What one of many ranks holds, and which way of sharing a model out follows: pure functions.

DDP keeps all weights, gradients and optimizer state on every rank; FSDP a share of each, and
gathers a block while it is computed (Zhao et al. 2023). All are float32, on a GPU too, where a pass
works on bfloat16 copies.
"""

from collections import Counter
from collections.abc import Sequence

from tgen.config import ModelConfig, Parallel, TrainConfig
from tgen.errors import UsageError
from tgen.reports import RankMemory
from tgen.training.plan.param_shapes import Shape, block_tensors, outer_tensors, size

USABLE = 0.9  # of a device's memory: the rest is for its driver, for messages, and for gaps
_MOST_RANKS = 1 << 14
# What autograd keeps a token and layer, in float32 numbers, counted: vectors of d_model, of all the
# heads, and of d_ff, which are half as large on a GPU; with dropout two of d_model more.
_KEPT = {"swiglu": (4, 4, 4), "relu": (5, 1, 1), "gelu": (5, 1, 2), "gelu_tanh": (5, 1, 2)}
_DROPOUT = 2
_LOGITS = 3  # times a GPU holds them at once: their logarithms and two gradients, in float32
_ORTHOGONAL = 4  # copies of a stack of matrices that Muon makes to orthogonalise it, measured
_BLOCKS = 3  # gathered at once: the one in use, the next one, and the gradients of one


def rank_memory(
    model: ModelConfig,
    train: TrainConfig,
    *,
    context: int,
    n_ranks: int,
    parallel: Parallel,
    on_gpu: bool,
) -> RankMemory:
    """The bytes that a rank holds at its peak, with `train.batch_size` windows of its own."""
    block, outer = block_tensors(model), outer_tensors(model)
    shares = n_ranks if parallel == "fsdp" else 1
    matrices = [shape for shape in block if len(shape) == 2]
    weights = size(outer, n_ranks=shares) + model.n_layers * size(block, n_ranks=shares)
    single = model.n_layers * size(matrices, n_ranks=shares) if train.optimizer == "muon" else 0
    gathered = _BLOCKS * size(block) + 2 * size(outer) if parallel == "fsdp" else 0
    # Those that matrix products made of the weights are kept until the gradients are known.
    halves = model.n_layers * size(matrices) if on_gpu else 0
    copies = 4 * gathered + 2 * halves
    activations = activation_bytes(model, train, context=context, on_gpu=on_gpu)
    update = 4 * _update(model, matrices, n_ranks, shares) if single else 0
    held = 4 * (2 * weights + 2 * weights - single)
    return RankMemory(
        parallel=parallel,
        weights=4 * weights,
        gradients=4 * weights,
        optimizer=4 * (2 * weights - single),
        activations=activations,
        copies=copies,
        update=update,
        total=held + max(activations + copies, update),  # the passes are over before the update
    )


def activation_bytes(model: ModelConfig, train: TrainConfig, *, context: int, on_gpu: bool) -> int:
    """What a pass over one rank's part of the batch keeps for its gradients, and a layer more for
    those in the making."""
    tokens = -(-train.batch_size // train.accumulation) * context
    narrow, heads, wide = _KEPT[model.activation]
    d_ff = wide * model.d_ff // (2 if on_gpu else 1)
    narrow += _DROPOUT if train.dropout > 0 else 0
    width = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    layer = narrow * model.d_model + heads * width + d_ff + context  # a mask of every window
    logits = _LOGITS * model.vocab_size if on_gpu else 0  # a processor makes them in pieces
    return 4 * tokens * ((model.n_layers + 1) * layer + logits)


def choose_parallel(
    model: ModelConfig,
    train: TrainConfig,
    *,
    context: int,
    n_ranks: int,
    memory: int | None,
    on_gpu: bool,
    wanted: Parallel | None = None,
) -> Parallel:
    """DDP where a rank's `memory` (bytes; None: unknown) has room for it, else FSDP.

    Raises UsageError where neither fits, or not what is `wanted`.
    """
    if memory is None:
        return wanted or "ddp"
    ways: list[Parallel] = [wanted] if wanted else ["ddp", "fsdp"] if n_ranks > 1 else ["ddp"]

    def needed(way: Parallel, ranks: int) -> int:
        held = rank_memory(
            model, train, context=context, n_ranks=ranks, parallel=way, on_gpu=on_gpu
        )
        return held.total

    def fits(way: Parallel, ranks: int) -> bool:
        return needed(way, ranks) <= USABLE * memory

    for way in ways:
        if fits(way, n_ranks):
            return way
    if wanted == "ddp" and n_ranks > 1 and fits("fsdp", n_ranks):
        remedy = "--parallel fsdp would fit"
    else:
        more = 2 * n_ranks
        while more <= _MOST_RANKS and not fits("fsdp", more):
            more *= 2
        remedy = (
            f"{more:,} ranks would hold it, sharded by FSDP"
            if more <= _MOST_RANKS
            else "make batch_size, context_length or the model smaller; --set accumulation=N takes "
            "a batch in parts"
        )
    raise UsageError(
        f"each of {n_ranks:,} ranks needs {_size(needed(ways[-1], n_ranks))} with "
        f"{ways[-1].upper()}; {_size(memory)} are given, of which {USABLE:.0%} can be used",
        remedy,
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.2g} MB"


def _update(model: ModelConfig, matrices: Sequence[Shape], n_ranks: int, shares: int) -> int:
    """Numbers that Muon holds for the matrices of one shape, at most: the updates one by one, as a
    stack, and back from all ranks; and a rank's part of them, which it orthogonalises for all."""
    most = 0
    for shape, n in Counter(matrices).items():
        count = model.n_layers * n
        stack, part = count * size([shape]), -(-count // n_ranks) * size([shape])
        most = max(most, (2 + (n_ranks > 1)) * -(-stack // shares) + _ORTHOGONAL * part)
    return most
