"""The batch size of a run."""

from tgen.config import ModelConfig, Precision
from tgen.training.plan.model_size import PlanInputs
from tgen.training.plan.step_time import step_seconds

_MIN_STEP_TOKENS, _MAX_STEP_TOKENS = 2048, 16384
_MAX_UPDATE_SHARE = 0.075  # of a step's time that Muon may take: more tokens then cost little


def choose_batch_size(
    model: ModelConfig, context: int, inputs: PlanInputs, precision: Precision
) -> int:
    """Return the windows of `context` tokens in a step, a multiple of the ranks."""
    limit = inputs.train_tokens // (8 * context)  # a step sees an eighth of the corpus at most
    wanted = _choose_step_tokens(model, precision) if inputs.on_cpu else _MAX_STEP_TOKENS
    return inputs.n_ranks * max(1, min(wanted // context, limit // inputs.n_ranks))


def _choose_step_tokens(model: ModelConfig, precision: Precision) -> int:
    tokens = _MIN_STEP_TOKENS
    while tokens < _MAX_STEP_TOKENS:
        total, without = (
            step_seconds(model, tokens, 1.0, precision=precision, muon=muon)
            for muon in (True, False)
        )
        if total - without <= _MAX_UPDATE_SHARE * total:
            break
        tokens *= 2
    return tokens
