"""A run's text once more: the same, where its tokens were damaged, or another to go on with."""

from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgen import corpus
from tgen.errors import CorpusError, TrainingError
from tgen.reports import RunReport
from tgen.runs import data
from tgen.runs.run_record import RunRecord
from tgen.runs.storage import state
from tgen.storage.disk_array import Array
from tgen.tokenizer import Tokenizer


def retokenize(
    out: Path,
    text: corpus.Corpus,
    record: RunRecord,
    tokenizer: Tokenizer,
    described: Mapping[str, Any],
) -> Generator[RunReport, None, dict[str, Array]]:
    """The run's tokens from its corpus, which is the same; on the disk, where they were damaged.

    Raises TrainingError if they are others.
    """
    config, folder = record.plan.train, state.folder(out)
    found = data.split(text, config, record.read_bytes)
    both = yield from data.tokenised(
        found, tokenizer, config, folder=folder, threads=record.threads
    )
    arrays, name = corpus.arrays(*both), described.get("name", state.TOKENS_FILE)
    if state.save_tokens(out, record.to_dict(), arrays, name=name) != described:
        raise TrainingError(
            f"the corpus gives other tokens than those the run in {out} began with",
            "the tokenizers library may be of another version; " + state.recovery_hint(out),
        )
    return state.load_tokens(out, described)


def with_corpus(
    out: Path, text: corpus.Corpus, names: list[str], record: RunRecord, tokenizer: Tokenizer
) -> Generator[RunReport, None, tuple[RunRecord, dict[str, Any]]]:
    """The run with another corpus, and its tokens as `load_tokens` takes them: on the disk beside
    the old ones, which hold until the record is saved.

    Raises CorpusError if there is too little to learn.
    """
    config, folder = record.plan.train, state.folder(out)
    found = data.split(text, config, record.read_bytes or text.n_bytes)
    train, held_out = yield from data.tokenised(
        found, tokenizer, config, folder=folder, threads=record.threads
    )
    if train.scored_bytes == 0 or len(train.tokens) <= record.plan.context_length:
        raise CorpusError(
            f"the new corpus has {len(train.tokens):,} tokens to train on, and a window of the run "
            f"in {out} takes {record.plan.context_length:,}",
            "name a longer text, or begin a new run with another --out",
        )
    changed = replace(
        record,
        corpus=names,
        corpus_sha256=text.sha256,
        corpus_bytes=text.n_bytes,
        corpus_changes=record.corpus_changes + 1,
        train_bytes=train.scored_bytes,
        held_out_bytes=held_out.scored_bytes,
        baselines={},
        plan=replace(record.plan, notes=found.notes),
    )
    name = state.tokens_file(changed.corpus_changes)
    arrays = corpus.arrays(train, held_out)
    return changed, state.save_tokens(out, changed.to_dict(), arrays, name=name)
