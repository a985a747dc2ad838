"""Resume a run: tokenize its corpus again, or another; load its newest training state."""

import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgen import corpus, distributed
from tgen.config.input_files import Reading
from tgen.errors import CorpusError, TrainingError, UsageError
from tgen.reports.training import PhaseReport
from tgen.runs import saved_state as run_state
from tgen.runs.chat_rows import tokenize_rows
from tgen.runs.run_record import RunRecord, check_field_types, recorded_corpus
from tgen.runs.text_sources import read_as_recorded
from tgen.runs.tokenizing import PhaseProgress, PreparedText, split_corpus, tokenize_split
from tgen.storage import files
from tgen.tokenizer import Tokenizer
from tgen.training.early_stopping import reset_best, reset_end
from tgen.training.state import Progress, TrainState, fits_model

# Counters that a rollback does not restore.
_NOT_ROLLED_BACK = (
    "steps_taken",
    "seconds",
    "setup_seconds",
    "evaluation_seconds",
    "saving_seconds",
    "skipped_steps",
    "n_divergences",
    "n_rollbacks",
    "learning_rate_scale",
)


def read_again(
    record: RunRecord, paths: Sequence[str], reading: Reading | None
) -> Generator[PhaseReport, None, corpus.Corpus]:
    """Yield the phase of `read_as_recorded`, and return the corpus."""
    steps = read_as_recorded(record, paths, reading)
    return (yield from PhaseProgress("reading the corpus", 1).report(steps))


def load_tokenizer(out: Path, record: RunRecord) -> Tokenizer:
    """Load a run's tokenizer or, if it is gone, the model's copy; raise TrainingError if it has
    changed, or without a copy."""
    path, copy = run_state.folder(out) / "tokenizer.json", out / "tokenizer.json"
    is_gone = not path.exists()
    text = b"" if is_gone and not copy.exists() else files.read(copy if is_gone else path)
    if record.tokenizer_sha256 != hashlib.sha256(text).hexdigest():
        if is_gone:
            raise TrainingError(f"{path} is missing", run_state.recovery_hint(out))
        raise TrainingError(
            f"{path} has changed since the run started", f"restore the file; {out} may have a copy"
        )
    n_rows = record.plan.model.vocab_size
    return Tokenizer(text.decode(), end_ids=record.end_ids, n_rows=n_rows)


def load_newest_state(out: Path, record: RunRecord) -> run_state.SavedState:
    """Load the newest intact state; raise TrainingError if none exists, and as `load_state`."""
    saved = run_state.load_state(out, run_id=record.run_id)
    if saved is None:
        damaged = run_state.damaged_states(out)
        details = f" ({', '.join(damaged[:5])} cannot be read)" if damaged else ""
        raise TrainingError(
            f"the run in {out} has no training state{details}", run_state.recovery_hint(out)
        )
    return saved


def load_progress(saved: run_state.SavedState, record: RunRecord) -> Progress:
    """Return a state's counters; reset them if the end or the corpus of the run has changed since.

    Raise TrainingError if this version has other counters.
    """
    try:
        progress = Progress(**saved.progress)
        if "windows" not in saved.progress:  # a state of an older version
            progress.windows = progress.step * record.plan.train.batch_size
        check_field_types(progress)
        numbers = [v for v in vars(progress).values() if isinstance(v, int | float)]
        if not all(0 <= v < math.inf for v in numbers) or progress.total_steps == 0:
            raise TypeError("a counter is out of range")
    except TypeError:
        version = saved.environment.get("tgen")
        raise TrainingError(
            f"the training state was written by tgen {version} and is not compatible",
            "resume with that version",
        ) from None
    if progress.end_changes != record.end_changes:
        reset_end(progress, record.end_changes)
    reset_best(progress, record.corpus_changes)
    return progress


def roll_back(
    out: Path, record: RunRecord, state: TrainState, *, from_step: int | None = None
) -> list[str]:
    """Restore the newest saved state or, with `from_step`, the first one from that step on.

    Return notes for the user. If no state from `from_step` on was saved, leave `state` unchanged.
    The time since the saved state still counts.
    """
    started_at, discarded = distributed.clock(), state.progress
    if from_step is None:
        saved: run_state.SavedState | None = load_newest_state(out, record)
    else:
        saved = run_state.load_state(out, run_id=record.run_id, from_step=from_step)
    if saved is None:
        return [f"no state from step {from_step:,} on could be saved"]
    state.restore(saved.arrays, load_progress(saved, record))
    for name in _NOT_ROLLED_BACK:
        setattr(state.progress, name, getattr(discarded, name))
    state.progress.seconds += distributed.clock() - started_at
    state.progress.consecutive_skips = 0
    return saved.damaged


def check_corpus(out: Path, record: RunRecord, text: corpus.Corpus, hint: str) -> None:
    """Raise TrainingError if the corpus has changed since the run in `out`."""
    if text.sha256 != record.corpus_sha256:
        raise TrainingError(
            f"the corpus has changed since the run in {out} started ({text.n_bytes:,} bytes, "
            f"previously {record.corpus_bytes:,})",
            hint,
        )


def check_fit(out: Path, record: RunRecord, saved: run_state.SavedState) -> None:
    """Raise TrainingError if the arrays of a state are not those of the record's model."""
    plan, adapter = record.plan, None
    if record.adapter is not None:
        adapter = record.adapter.new_adapter(plan.model)
    if not fits_model(saved.arrays, plan.model, plan.train.optimizer, adapter):
        raise TrainingError(
            f"the training state in {out} does not fit the model in training/run.json",
            run_state.recovery_hint(out),
        )


def resume_notes(
    saved: run_state.SavedState,
    record: RunRecord,
    progress: Progress,
    environment: Mapping[str, Any],
) -> list[str]:
    """Return notes for the user on a run that continues from a saved state."""
    notes = [*saved.damaged, *record.overridden]
    if progress.step == progress.total_steps:
        notes.append(
            f"the run ended at step {progress.step:,}; --override --steps N with more continues it"
        )
    if difference := environment_diff(saved.environment, environment):
        notes.append(f"results may differ from an uninterrupted run: {difference}")
    return notes


def environment_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """List the differences of two environments; if empty, the run resumes bit for bit on
    the same machine."""
    old = {"ranks": 1, **old}
    return ", ".join(
        f"{name} was {old.get(name)}, now {new[name]}" for name in new if old.get(name) != new[name]
    )


def retokenize(
    out: Path,
    text: corpus.Corpus,
    record: RunRecord,
    tokenizer: Tokenizer,
    tokens_entry: Mapping[str, Any],
) -> Generator[PhaseReport, None, None]:
    """Replace the damaged tokens of the run in `out` from the same corpus.

    Raise TrainingError if the tokens do not match run.json.
    """
    again = yield from tokenize_again(text, record, tokenizer, folder=run_state.folder(out))
    name = tokens_entry.get("name", run_state.TOKENS_FILE)
    tokens = corpus.token_arrays(again.train, again.val)
    if run_state.save_tokens(out, record.to_dict(), tokens, name=name) != tokens_entry:
        raise TrainingError(
            f"the corpus does not produce the tokens that the run in {out} started with",
            "check the version of the tokenizers library; " + run_state.recovery_hint(out),
        )


def tokenize_again(
    text: corpus.Corpus, record: RunRecord, tokenizer: Tokenizer, *, folder: Path | None
) -> Generator[PhaseReport, None, PreparedText]:
    """Tokenize a corpus as the run of the record did, with temporary files in `folder`."""
    config = record.plan.train
    if record.chat is not None:
        return (
            yield from tokenize_rows(
                text,
                record.chat,
                tokenizer,
                config,
                context_length=record.plan.context_length,
                max_bytes=record.read_bytes,
                folder=folder,
                threads=record.threads,
            )
        )
    limits = record.read_bytes, record.max_val_bytes, record.sample_pieces
    train, val, _, notes = split_corpus(text, config, *limits)
    begin_ids = () if record.begin_of_text is None else corpus.begin_of_document(tokenizer)
    again = yield from tokenize_split(
        train, val, tokenizer, config, folder=folder, threads=record.threads, begin_ids=begin_ids
    )
    return again._replace(notes=[*notes, *again.notes], sample_prompt=record.sample_prompt)


def tokenize_new_corpus(
    out: Path,
    text: corpus.Corpus,
    names: list[str],
    record: RunRecord,
    tokenizer: Tokenizer,
    progress: Progress,
) -> Generator[PhaseReport, None, tuple[RunRecord, dict[str, Any]]]:
    """Tokenize another corpus for the run in `out`; return its record, with a note of the change
    after `progress`, and tokens entry.

    The tokens are written beside the old ones, which stay in use until the record is saved. Raise
    CorpusError if the corpus is too short, UsageError if the run has ended.
    """
    if progress.total_steps is not None and progress.step >= progress.total_steps:
        raise UsageError(
            f"the run has ended at step {progress.step:,}, so another corpus has no effect",
            "set more --steps or --minutes, or fine-tune the model with --from",
        )
    if text.is_chat != (record.chat is not None):
        raise CorpusError(
            f"the run in {out} trains on {'text' if text.is_chat else 'conversations'}, but the "
            f"new corpus has {'conversations' if text.is_chat else 'text'}",
            "start a new run with another --out",
        )
    again = yield from tokenize_again(text, record, tokenizer, folder=run_state.folder(out))
    n_tokens = len(again.train.ids)
    is_short = n_tokens <= record.plan.context_length and not record.plan.ends_when_learned
    if record.chat is None and (is_short or again.train_bytes == 0):
        raise CorpusError(
            f"the new corpus is too short ({n_tokens:,} training tokens; the run in "
            f"{out} needs more than {record.plan.context_length:,})",
            "name a longer text, or start a new run with another --out",
        )
    note = (
        f"from step {progress.step}: corpus {record.corpus_bytes:,} bytes "
        f"({record.corpus_sha256[:8]}) -> {text.n_bytes:,} ({text.sha256[:8]})"
    )
    record = replace(
        record,
        overridden=[*record.overridden, note],
        corpus=recorded_corpus(names),
        corpus_sha256=text.sha256,
        corpus_bytes=text.n_bytes,
        corpus_changes=record.corpus_changes + 1,
        train_bytes=again.train_bytes,
        held_out_bytes=again.held_out_bytes,
        baselines={},
        chat=again.chat,
        sample_prompt=again.sample_prompt,
        plan=replace(record.plan, notes=again.notes),
    )
    name = f"tokens-{record.corpus_changes}.safetensors"
    tokens = corpus.token_arrays(again.train, again.val)
    return record, run_state.save_tokens(out, record.to_dict(), tokens, name=name)
