"""The batch size of a run."""

from tgen.training.plan.model_size import PlanInputs

_STEP_TOKENS = 2048


def choose_batch_size(context: int, inputs: PlanInputs) -> int:
    """Return the windows of `context` tokens in a step, a multiple of the ranks."""
    limit = inputs.train_tokens // (8 * context)  # a step sees an eighth of the corpus at most
    return inputs.n_ranks * max(1, min(_STEP_TOKENS // context, limit // inputs.n_ranks))
