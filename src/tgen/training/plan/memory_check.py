"""How much memory a run needs: to say so before it starts, not to be killed for it."""

from tgen.config import ModelConfig, TrainConfig
from tgen.errors import UsageError
from tgen.training.plan.model_size import matmul_params

# What a backward pass finds again, a token and layer: vectors of d_model and of d_ff, measured.
_VECTORS = {"gated": (27, 5), "plain": (15, 2)}
_COPIES = 5  # of the weights: themselves, gradients, two moments, and one in the making


def step_bytes(model: ModelConfig, *, batch_size: int, accumulation: int, context: int) -> int:
    """About what one training step holds at its peak, in float32."""
    narrow, wide = _VECTORS["gated" if model.activation == "swiglu" else "plain"]
    tokens = -(-batch_size // accumulation) * context
    kept = tokens * model.n_layers * (narrow * model.d_model + wide * model.d_ff)
    return 4 * (kept + _COPIES * matmul_params(model))


def check_memory(model: ModelConfig, train: TrainConfig, context: int, memory: int | None) -> None:
    """Raises UsageError if a step needs more than the `memory` bytes there are; None: unknown."""
    needed = step_bytes(
        model, batch_size=train.batch_size, accumulation=train.accumulation, context=context
    )
    if memory is not None and needed > memory:
        raise UsageError(
            f"a step needs about {needed / 1e9:,.0f} GB with batch_size={train.batch_size}, "
            f"d_model={model.d_model}, d_ff={model.d_ff}; there are {memory / 1e9:,.0f}",
            "make the largest smaller; --set accumulation=N takes a batch in parts",
        )
