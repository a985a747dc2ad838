"""The plan as a table, each choice with its reason in words."""

from collections.abc import Mapping
from dataclasses import replace

from tgen.config import TrainConfig
from tgen.reports import Choice
from tgen.training.plan.budget import Budget
from tgen.training.plan.model_size import PlanInputs, Shape


def explain(
    shape: Shape,
    config: TrainConfig,
    pace: Budget,
    facts: PlanInputs,
    *,
    overrides: Mapping[str, str],
    fine_tuning: bool,
) -> list[Choice]:
    """The rows of the table; what the user set has no other reason."""
    whole = fine_tuning or not facts.splittable
    choices = [
        Choice("size", shape.size, shape.why_size),
        Choice("context", f"{shape.context_length} tokens", shape.why_context),
        Choice("batch", _windows(config), f"{pace.step_tokens:,} tokens a step"),
        Choice("rates", _rates(config), _why_rates(config, fine_tuning)),
        Choice("dropout", f"{config.dropout:g}", _why_dropout(pace)),
        Choice(
            "token split",
            f"{config.token_split:.0%}",
            _why_split(config, whole=whole),
        ),
        Choice("steps", _count(pace.steps, exact=config.steps is not None), _speed(facts)),
        _evaluation(config, pace, facts),
    ]
    return [_as_set(choice, overrides) for choice in choices]


def _windows(config: TrainConfig) -> str:
    return f"{config.batch_size} window{'s' if config.batch_size > 1 else ''}"


def _evaluation(config: TrainConfig, pace: Budget, facts: PlanInputs) -> Choice:
    if facts.held_out_tokens == 0:
        return Choice("evaluation", "none", f"saved every {config.eval_every} steps")
    if (config.eval_every or 0) >= pace.steps:
        return Choice("evaluation", "once", "at the end")
    return Choice(
        "evaluation", f"every {config.eval_every} steps", "a twentieth of the time or less"
    )


def _rates(config: TrainConfig) -> str:
    if config.optimizer == "adamw":
        return f"AdamW {config.learning_rate:g}"
    return f"Muon {config.matrix_learning_rate:g}, AdamW {config.learning_rate:g}"


def _why_rates(config: TrainConfig, fine_tuning: bool) -> str:
    gentle = "gentler, to keep what the model knows; " if fine_tuning else ""
    up = f"up over {config.warmup_steps} steps, " if config.warmup_steps else ""
    return f"{gentle}{up}down over the last {config.decay_fraction:.0%}"


def _why_dropout(pace: Budget) -> str:
    weights, epochs = pace.params_per_token, pace.epochs
    return f"{_plain(weights)} weights for each token will read it {_plain(epochs)} times"


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _why_split(config: TrainConfig, *, whole: bool) -> str:
    if config.token_split > 0:
        return "of the tokens are taken apart at random, so that each reading differs"
    return "tokens stay whole" if whole else "the text is not read often"


def _count(steps: int, *, exact: bool) -> str:
    if exact:
        return f"{steps:,}"
    digits = max(0, len(str(steps)) - 2)
    return f"about {round(steps, -digits):,}"


def _speed(facts: PlanInputs) -> str:
    return f"this machine trains at {facts.speed / 1e9:,.0f} GFLOP/s"


def _as_set(choice: Choice, overrides: Mapping[str, str]) -> Choice:
    """A choice that the user made has no other reason."""
    fields = _FIELDS.get(choice.name, ())
    is_set = fields and set(fields) <= set(overrides) and choice.value != "none"
    return replace(choice, why="as set") if is_set else choice


_FIELDS = {
    "batch": ("batch_size",),
    "rates": ("learning_rate", "matrix_learning_rate"),
    "dropout": ("dropout",),
    "token split": ("token_split",),
    "evaluation": ("eval_every",),
}
