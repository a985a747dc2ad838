"""What is asked of a run that goes on, against what it began with."""

from dataclasses import asdict, replace

from tgen.errors import TrainingError, UsageError
from tgen.runs.request import ResumeRequest
from tgen.runs.run_record import RunRecord
from tgen.training.early_stopping import reset_end
from tgen.training.plan.overrides import parse_overrides
from tgen.training.state import Progress

_NEVER = {"optimizer", "loss_on", "val_fraction", "compile"}  # the state or the text hangs on them
_OF_THE_END = {"steps", "minutes", "decay_fraction"}


def apply_overrides(record: RunRecord, request: ResumeRequest, progress: Progress) -> RunRecord:
    """The record with what was asked for in its place, which it notes; `progress` forgets the end
    that it knew where another is asked for.

    Raises TrainingError, with the first difference, unless differences are allowed, and UsageError
    where they are impossible.
    """
    of_model, of_run = parse_overrides(request.overrides)
    for name, value in of_model.items():
        ours = getattr(record.plan.model, name)
        if value != ours:
            raise UsageError(
                f"{name} is {ours} in this run, not {value}",
                "a model keeps its shape: begin a new run with another --out",
            )
    asked = {**request.settings, **of_run}
    if "minutes" in asked:
        asked.setdefault("steps", None)
    train = asdict(record.plan.train)
    changed = {name: value for name, value in asked.items() if train[name] != value}
    if not changed:
        return record
    first = next(iter(changed))
    if never := changed.keys() & _NEVER:
        name = min(never)
        raise UsageError(
            f"{name} is {train[name]} in this run, not {changed[name]}",
            "it cannot change on the way: begin a new run with another --out",
        )
    if not request.override:
        ours = f"{first} is {train[first]} in this run, not {changed[first]}"
        if first == "minutes" and train["steps"] is not None:
            ours = f"this run takes {train['steps']:,} steps, not minutes"
        raise TrainingError(
            ours, "leave it away, or add --override, which notes the change in training/run.json"
        )
    if (steps := changed.get("steps")) is not None and steps <= progress.step:
        raise UsageError(f"--steps {steps}: the run is at step {progress.step:,}", "give more")
    config = replace(record.plan.train, **changed)
    end_changes = record.end_changes
    if changed.keys() & _OF_THE_END:  # older states find it in the record, not the end they know
        end_changes += 1
        reset_end(progress, end_changes)
    noted = [
        f"from step {progress.step}: {name} {train[name]} -> {value}"
        for name, value in changed.items()
    ]
    plan = replace(record.plan, train=config)
    return replace(
        record, plan=plan, end_changes=end_changes, overridden=[*record.overridden, *noted]
    )


def record_corpus_change(record: RunRecord, before: RunRecord, progress: Progress) -> RunRecord:
    """The record of a run that has got another corpus than `before`, which it notes.

    Raises UsageError if the run would not learn from it any more.
    """
    if progress.total_steps is not None and progress.step >= progress.total_steps:
        raise UsageError(
            f"the run has ended at step {progress.step:,}: it learns nothing of another corpus",
            "give more --steps or --minutes, or fine-tune its model with --from",
        )
    noted = (
        f"from step {progress.step}: corpus {before.corpus_bytes:,} bytes "
        f"({before.corpus_sha256[:8]}) -> {record.corpus_bytes:,} ({record.corpus_sha256[:8]})"
    )
    return replace(record, overridden=[*record.overridden, noted])
