"""The losses and learning rates of a run, as `runs.curves` reads them from its log."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingCurves:
    """Series of a run: one value per StepReport, or one per evaluation."""

    steps: list[int]
    seconds: list[float]  # training time by step
    losses: list[float]  # nats per token, smoothed
    smoothing: int  # steps averaged
    learning_rates: list[float]
    evaluation_steps: list[int]
    evaluation_seconds: list[float]
    evaluation_tokens: list[int]  # trained on until then; 0: the log has no plan
    evaluation_bits: list[float]  # bits per byte of the validation text
    bits_per_nat: float | None  # bits per byte for each nat per token; None: unknown
    best_step: int | None  # None: no evaluation yet
    best_bits_per_byte: float | None
    tokens: int | None  # trained on; None: the log has no plan
    median_tokens_per_second: float
    n_sessions: int
