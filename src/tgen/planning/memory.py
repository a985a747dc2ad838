"""Memory of a training run on one or many ranks: pure functions.

DDP stores all weights, gradients and optimizer states on every rank. FSDP stores a shard of each
and gathers a block while it is computed (Zhao et al. 2023). All are float32, on a GPU too, where a
pass works on bfloat16 copies, which FSDP gathers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tgen.config import ModelConfig
from tgen.config.training import (
    MAX_STORED_LENGTH,
    QUERY_CHUNK,
    SHARDED,
    Parallel,
    ResolvedTrainConfig,
)
from tgen.errors import UsageError
from tgen.planning.costs import (
    FrozenModel,
    TensorShape,
    block_matrices,
    block_shapes,
    n_elements,
    outer_shapes,
)
from tgen.reports.number_format import format_bytes
from tgen.reports.training import RankMemory

USABLE = 0.9  # fraction of a device's memory: the rest is for driver, messages, fragmentation

# Float32 numbers that autograd stores per token and layer, counted: vectors of d_model, of all
# heads, and of d_ff (half as large on a GPU); dropout adds two of d_model.
_STORED = {
    "swiglu": (4, 3, 4),
    "geglu": (4, 4, 5),
    "relu": (5, 1, 1),
    "relu2": (5, 1, 2),
    "gelu": (5, 1, 2),
    "gelu_tanh": (5, 1, 3),
}
_DROPOUT = 2
# Layers at once, with gradients; on a CPU with what the allocator keeps (measured: 1 to 5).
_CHECKPOINTED_LAYERS, _CHECKPOINTED_ON_GPU = 5, 3
_PROCESS_BYTES = 512 << 20  # interpreter, torch and the allocator's reserves
_CHUNK_ROWS = 256  # of logits at once on a CPU
_LOGITS = 3  # copies on a GPU: log-probabilities and two gradients, float32
_ORTHOGONALIZE = 4  # copies of a stack of matrices that Muon makes, measured
_TRANSPOSED = ("classic", "gpt2")  # families whose matrices are stored transposed
# Bytes per element of the blocks that FSDP gathers at once: the weights of two, the gradients of
# one, and their float32 sum if they are bfloat16.
_GATHERED = {"float32": 12, "bfloat16": 10}


def check_memory(
    model: ModelConfig,
    train: ResolvedTrainConfig,
    context: int,
    memory: int | None,
    *,
    frozen: FrozenModel | None = None,
) -> None:
    """Raise UsageError if training on this machine needs more than `memory` bytes; None: unknown.

    The error comes before the run starts, so that the system does not kill it later.
    """
    needed = rank_memory(
        model, train, context=context, n_ranks=1, parallel="ddp", on_gpu=False, frozen=frozen
    ).total
    if memory is not None and needed > memory:
        raise UsageError(
            f"training needs about {format_bytes(needed)} of memory with "
            f"batch_size={train.batch_size}, n_layers={model.n_layers}, "
            f"d_model={model.d_model}, d_ff={model.d_ff}; "
            f"{format_bytes(memory)} is available",
            "reduce one of them; --set accumulation=N splits a batch into micro-batches",
        )


def rank_memory(
    model: ModelConfig,
    train: ResolvedTrainConfig,
    *,
    context: int,
    n_ranks: int,
    parallel: Parallel,
    on_gpu: bool,
    frozen: FrozenModel | None = None,
) -> RankMemory:
    """Return the bytes of a rank at its peak, for its own `train.batch_size` windows; with `frozen`
    weights, only an adapter is trained. With HSDP, `n_ranks` are those of one machine."""
    if frozen is not None:
        return _adapter_memory(model, train, frozen, context=context, on_gpu=on_gpu)
    block, outer, matrices = block_shapes(model), outer_shapes(model), block_matrices(model)
    n_shards = n_ranks if parallel in SHARDED else 1
    weights = n_elements(outer, n_ranks=n_shards)
    weights += model.n_layers * n_elements(block, n_ranks=n_shards)
    muon, muon_elements = train.optimizer == "muon", n_elements(matrices, n_ranks=n_shards)
    moments = 2 * weights - model.n_layers * muon_elements * muon  # Muon has one moment
    copies = 0
    if parallel in SHARDED:
        gathered = _GATHERED["bfloat16" if on_gpu else train.precision]
        head = model.vocab_size * model.d_model  # other outer gradients come when blocks are done
        copies = gathered * n_elements(block) + 4 * (n_elements(outer) + head)
    elif on_gpu:  # products store bfloat16 copies of the weights until gradients are computed
        copies = 2 * model.n_layers * n_elements(matrices)
    activations = activation_bytes(model, train, context=context, on_gpu=on_gpu)
    update = 4 * _update_elements(model, matrices, n_ranks, n_shards) if muon else 0
    transposed = model.n_layers * n_elements(matrices) if model.family in _TRANSPOSED else 0
    saving = 4 * (n_elements(outer) + model.n_layers * n_elements(block) + transposed)
    permanent = 4 * (weights + moments)
    if parallel in SHARDED:  # a save in the background has copies of the model and of the state
        saving += permanent
    elif on_gpu:  # the state comes into RAM after the model has been written
        saving = max(saving, permanent)
    step = 4 * weights + max(activations + copies, update)  # the update runs after the passes
    if not on_gpu:  # else a save needs other memory
        step = step + saving if parallel in SHARDED else max(step, saving)
    return RankMemory(
        parallel=parallel,
        weights=4 * weights,
        gradients=4 * weights,
        optimizer=4 * moments,
        activations=activations,
        copies=copies,
        update=update,
        saving=saving,
        total=permanent + step,
    )


def peak_bytes(
    model: ModelConfig,
    train: ResolvedTrainConfig,
    context: int,
    frozen: FrozenModel | None,
    *,
    n_ranks: int = 1,
    on_gpu: bool = False,
) -> int:
    """Return the memory of one of the ranks that share the batch, at its peak, with DDP and with
    the programs in it."""
    train = replace(train, batch_size=-(-train.batch_size // n_ranks))
    memory = rank_memory(
        model, train, context=context, n_ranks=n_ranks, parallel="ddp", on_gpu=on_gpu, frozen=frozen
    )
    return memory.total + _PROCESS_BYTES


def fitting_context(
    model: ModelConfig,
    wanted: int,
    memory: int | None,
    *,
    frozen: FrozenModel | None,
    on_gpu: bool,
) -> int:
    """Return `wanted` tokens, or fewer if not even one window of them, with all activations
    computed again, fits into half of `memory` (bytes; None: unknown)."""
    train = ResolvedTrainConfig(batch_size=1, activation_checkpointing=True)
    context = wanted
    while memory is not None and context > 1:
        if peak_bytes(model, train, context, frozen, on_gpu=on_gpu) <= memory / 2:
            break
        context -= -(-context // 8)
    return context


def _adapter_memory(
    model: ModelConfig,
    train: ResolvedTrainConfig,
    frozen: FrozenModel,
    *,
    context: int,
    on_gpu: bool,
) -> RankMemory:
    trained = n_elements(frozen.adapter)
    moments = trained if train.optimizer == "muon" else 2 * trained
    activations = activation_bytes(model, train, context=context, on_gpu=on_gpu)
    ranks = sum(shape[0] for shape in frozen.adapter if shape[1] >= shape[0])
    activations += 4 * ranks * -(-train.batch_size // train.accumulation) * context
    weights = frozen.n_bytes + 4 * trained
    update = 4 * (2 + _ORTHOGONALIZE) * trained * (train.optimizer == "muon")
    saving = 4 * (trained + moments if on_gpu else trained)
    return RankMemory(
        parallel="ddp",
        weights=weights,
        gradients=4 * trained,
        optimizer=4 * moments,
        activations=activations,
        copies=frozen.largest_matrix,
        update=update,
        saving=saving,
        total=weights
        + 4 * moments
        + max(4 * trained + max(activations + frozen.largest_matrix, update), saving),
    )


def activation_bytes(
    model: ModelConfig, train: ResolvedTrainConfig, *, context: int, on_gpu: bool
) -> int:
    """Return the bytes that a pass over a rank's micro-batch stores for its gradients, and one
    layer more for gradients being computed."""
    tokens = train.passes * -(-train.batch_size // train.accumulation) * context
    n_model, n_heads, n_ff = _STORED[model.activation]
    n_model += _DROPOUT if train.dropout > 0 else 0
    width = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    ff = n_ff * model.d_ff // (2 if on_gpu else 1)
    layer = n_model * model.d_model + n_heads * width + ff
    if not on_gpu and QUERY_CHUNK < context <= MAX_STORED_LENGTH:
        weights = model.n_heads * (context + QUERY_CHUNK) // 2  # of keys up to the chunk's end
        layer += weights // 2 if train.precision == "bfloat16" else weights
    else:
        layer += context  # a mask per window
    logits = _LOGITS * model.vocab_size if on_gpu else 0
    if train.activation_checkpointing:  # the input of each block; one block again, its gradients
        n_layers = min(_CHECKPOINTED_ON_GPU if on_gpu else _CHECKPOINTED_LAYERS, model.n_layers)
        # The logits are freed before the first block is computed again.
        stored = model.n_layers * model.d_model + max(n_layers * layer, logits)
    else:
        stored = (model.n_layers + 1) * layer + logits
    chunk = 0 if on_gpu else min(tokens, _CHUNK_ROWS) * model.vocab_size
    return 4 * (tokens * stored + chunk)


def _update_elements(
    model: ModelConfig, matrices: Sequence[TensorShape], n_ranks: int, n_shards: int
) -> int:
    """Return the most elements that Muon stores for the matrices of one shape: the updates one by
    one, stacked, and from all ranks; and the part of them that this rank orthogonalizes."""
    most = 0
    for shape, n in Counter(matrices).items():
        count = model.n_layers * n
        stack, part = count * n_elements([shape]), -(-count // n_ranks) * n_elements([shape])
        most = max(most, (2 + (n_ranks > 1)) * -(-stack // n_shards) + _ORTHOGONALIZE * part)
    return most
