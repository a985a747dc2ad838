"""Hyperparameters of fine-tuning, by the size of the model and the number of rows.

Sources: Schulman et al. 2025, "LoRA Without Regret" (rates, alpha, targets, batch size); Moonlight
(Liu et al. 2025; the size of Muon's updates); own measurements with a model of 2.4 million
parameters.
"""

import math

from tgen.config.training import Optimizer, TrainConfig

WINDOW = 512  # tokens that count as a row of plain text, and the windows of plain text
WEIGHT_DECAY = 0.01  # of all weights; an adapter has none
PATIENCE = 2  # evaluations
_REFERENCE = 1.24e9  # parameters of the model that the rates were measured with
_LORA_RATE, _MAX_LORA_RATE = 1e-3, 2e-3
_RATE, _MAX_RATE = 1e-4, 3e-4
_WARMUP, MIN_WARMUP_STEPS = 0.05, 5
_FEWEST_ROWS, _FEWEST_ROWS_PER_STEP, _MOST_ROWS_PER_STEP = 50, 4, 32
_EPOCHS = {  # at most, for 50, 500, 5,000 and 50,000 rows
    True: (12.0, 4.0, 3.0, 2.0),  # rows with targets, such as chats
    False: (10.0, 4.0, 2.0, 2.0),  # plain text
}
_MAX_EPOCHS = 12.0
MAX_MEMORIZED_ROWS = 100  # answers; training until more are memorized forgets too much
_SMALL_MODEL = 1e8  # parameters; smaller models need more epochs to learn the facts in rows


def choose_optimizer(train: TrainConfig, source_optimizer: str | None) -> Optimizer:
    """Return the user's optimizer, else AdamW for an adapter, else that of the base model's own
    training: Muon forgets more of a model that AdamW has trained."""
    if train.optimizer is not None:
        return train.optimizer
    return "muon" if source_optimizer == "muon" and train.lora is None else "adamw"


def learning_rate(n_parameters: int, *, lora: bool) -> float:
    """Return AdamW's learning rate for a base model of this size."""
    factor = math.sqrt(_REFERENCE / n_parameters)
    if lora:
        return min(_MAX_LORA_RATE, _LORA_RATE * factor)
    return min(_MAX_RATE, _RATE * factor)


def rows_per_step(n_rows: int) -> int:
    """Return 4 rows per step for 50 rows, and twice as many for ten times the rows, up to 32."""
    doublings = round(math.log10(max(1.0, n_rows / _FEWEST_ROWS)))
    return min(_MOST_ROWS_PER_STEP, _FEWEST_ROWS_PER_STEP << doublings)


def max_epochs(n_rows: int, *, has_rows: bool, n_parameters: float) -> float:
    """Return the maximum epochs, interpolated between powers of ten.

    Rows take about three times the epochs with 1% of the parameters.
    """
    table = _EPOCHS[has_rows]
    position = min(len(table) - 1.0, math.log10(max(1.0, n_rows / _FEWEST_ROWS)))
    i = min(len(table) - 2, int(position))
    epochs = float(table[i] * (table[i + 1] / table[i]) ** (position - i))
    if has_rows:
        epochs *= max(1.0, (_SMALL_MODEL / n_parameters) ** 0.25)
    return min(_MAX_EPOCHS, epochs)


def warmup_steps(steps: int) -> int:
    """Return 5% of the steps, at least 5 if there are enough."""
    return min(max(MIN_WARMUP_STEPS, round(_WARMUP * steps)), steps // 4)


def explain_rate(train: TrainConfig) -> str:
    """Return the reason for the learning rates."""
    if train.lora is not None:
        return "by the model's size; higher than for full fine-tuning; "
    if train.optimizer == "muon":
        return "by the model's size, as it was trained with Muon; "
    return "by the model's size; "
