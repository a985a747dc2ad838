"""Split the corpus into training and validation text, and tokenize both."""

import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tgen import corpus
from tgen.config import TrainConfig
from tgen.corpus import TokenizedCorpus
from tgen.errors import CorpusError, TrainingError
from tgen.model.cpu_count import cpu_count
from tgen.reports.training import PreparingReport
from tgen.runs.run_record import RunRecord
from tgen.runs.storage import state
from tgen.tokenizer import Tokenizer

_COMPARED_BYTES = 1 << 21
_LARGE_OVERLAP = 0.05
_FEW_VAL_BYTES = 1 << 14
_PARALLEL_BYTES = 1 << 24  # from this size on, several processes are faster
_REPORT_SECONDS = 1.0


class TextSplit(NamedTuple):
    """Training and validation documents, limited by the time budget."""

    corpus: corpus.Corpus
    train: corpus.Documents
    val: corpus.Documents
    train_continues: bool  # the last training document continues in the validation split
    notes: list[str]
    all_train_bytes: int  # before the limit


def split_corpus(text: corpus.Corpus, config: TrainConfig, max_bytes: int) -> TextSplit:
    """Split a corpus, and sample about `max_bytes` of the training split."""
    notes = [f"skipped {name}: not a text file" for name in text.skipped]
    split = corpus.split_train_val(text, config.val_fraction)
    if not split.val or not split.train:
        split = corpus.TrainValSplit(text.documents, min(split.train, split.val, key=len))
        notes.append("no validation split: the last weights are saved, not the best")
    if split.n_dropped:
        notes.append(
            f"copies of validation documents dropped: {split.n_dropped:,} "
            f"({split.dropped_bytes:,} bytes)"
        )
    train = corpus.subsample_documents(split.train, max_bytes)
    val = corpus.subsample_documents(split.val, corpus.MAX_VAL_BYTES)
    if train is not split.train:
        notes.append(
            f"trains on an evenly spaced sample of {train.n_bytes:,} bytes: more would exceed the "
            "time budget"
        )
    if 0 < val.n_bytes < _FEW_VAL_BYTES:
        notes.append(
            f"the validation split has only {val.n_bytes:,} bytes, so its numbers are imprecise; "
            "--val-fraction 0 trains on everything and saves the last weights"
        )
    samples = (
        join_documents(corpus.subsample_documents(documents, _COMPARED_BYTES))
        for documents in (split.train, val)
    )
    overlap = corpus.overlap_fraction(*samples)
    if overlap >= _LARGE_OVERLAP:
        notes.append(
            f"at least {overlap:.0%} of the validation split is also in the training split, in "
            "runs of 64 bytes or more: validation loss is too optimistic"
        )
    continues = split.cuts_document and train is split.train
    return TextSplit(text, train, val, continues, notes, split.train.n_bytes)


def tokenize_split(
    split: TextSplit,
    tokenizer: Tokenizer,
    config: TrainConfig,
    *,
    folder: Path | None,
    threads: int | None,
) -> Generator[PreparingReport, None, tuple[TokenizedCorpus, TokenizedCorpus]]:
    """Tokenize the training and validation split, and close the corpus; yield progress.

    Use `threads` processes for a large corpus. Characters that the tokenizer cannot express are
    replaced and counted in the notes. Raise CorpusError if the corpus has changed since it was
    read.
    """
    progress = _TokenizingProgress(split.train.n_bytes + split.val.n_bytes)
    n_cpus = cpu_count()
    is_large = split.train.n_bytes >= _PARALLEL_BYTES
    train = yield from progress.report(
        corpus.tokenize_documents(
            split.train,
            tokenizer,
            loss_on=config.loss_on,
            open_end=split.train_continues,
            folder=folder,
            processes=min(threads or n_cpus, n_cpus) if is_large else 1,
        )
    )
    progress.bytes_before = split.train.n_bytes
    val = yield from progress.report(
        corpus.tokenize_documents(split.val, tokenizer, loss_on=config.loss_on, folder=folder)
    )
    split.corpus.close()
    if n_replaced := train.n_replaced + val.n_replaced:
        split.notes.append(
            f"replaced {n_replaced:,} character{'s' * (n_replaced != 1)} that the tokenizer cannot "
            "express by U+FFFD"
        )
    return train, val


def retokenize(
    out: Path,
    text: corpus.Corpus,
    record: RunRecord,
    tokenizer: Tokenizer,
    tokens_entry: Mapping[str, Any],
) -> Generator[PreparingReport, None, None]:
    """Replace the damaged tokens of the run in `out` from the same corpus.

    Raise TrainingError if the tokens do not match run.json.
    """
    config, folder = record.plan.train, state.folder(out)
    split = split_corpus(text, config, record.read_bytes)
    train, val = yield from tokenize_split(
        split, tokenizer, config, folder=folder, threads=record.threads
    )
    arrays = corpus.token_arrays(train, val)
    name = tokens_entry.get("name", state.TOKENS_FILE)
    entries = (  # the names of the arrays are part of the file's digest
        state.save_tokens(out, record.to_dict(), named_arrays, name=name)
        for named_arrays in (arrays, corpus.to_old_names(arrays))
    )
    if not any(entry == tokens_entry for entry in entries):
        raise TrainingError(
            f"the corpus does not produce the tokens that the run in {out} started with",
            "check the version of the tokenizers library; " + state.recovery_hint(out),
        )


def tokenize_new_corpus(
    out: Path, text: corpus.Corpus, names: list[str], record: RunRecord, tokenizer: Tokenizer
) -> Generator[PreparingReport, None, tuple[RunRecord, dict[str, Any]]]:
    """Tokenize another corpus for the run in `out`; return its record and tokens entry.

    The tokens are written beside the old ones, which stay in use until the record is saved. Raise
    CorpusError if the corpus is too short.
    """
    config, folder = record.plan.train, state.folder(out)
    split = split_corpus(text, config, record.read_bytes or text.n_bytes)
    train, val = yield from tokenize_split(
        split, tokenizer, config, folder=folder, threads=record.threads
    )
    if train.target_bytes == 0 or len(train.tokens) <= record.plan.context_length:
        raise CorpusError(
            f"the new corpus is too short ({len(train.tokens):,} training tokens; the run in "
            f"{out} needs more than {record.plan.context_length:,})",
            "name a longer text, or start a new run with another --out",
        )
    record = replace(
        record,
        corpus=names,
        corpus_sha256=text.sha256,
        corpus_bytes=text.n_bytes,
        corpus_changes=record.corpus_changes + 1,
        train_bytes=train.target_bytes,
        held_out_bytes=val.target_bytes,
        baselines={},
        plan=replace(record.plan, notes=split.notes),
    )
    arrays = corpus.token_arrays(train, val)
    name = f"tokens-{record.corpus_changes}.safetensors"
    return record, state.save_tokens(out, record.to_dict(), arrays, name=name)


class _TokenizingProgress:
    """Tokenizing progress, reported once per second."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._started_at = self._reported_at = time.monotonic()
        self.bytes_before = 0  # bytes processed before the current `report`

    def report(
        self, steps: Generator[int, None, TokenizedCorpus]
    ) -> Generator[PreparingReport, None, TokenizedCorpus]:
        """Run `steps`, which yields the number of processed bytes, and return its result."""
        while True:
            try:
                n_done = self.bytes_before + next(steps)
            except StopIteration as end:
                result: TokenizedCorpus = end.value
                return result
            now = time.monotonic()
            if now - self._reported_at >= _REPORT_SECONDS:
                self._reported_at = now
                fraction = n_done / self._n_bytes
                seconds_left = (now - self._started_at) * (1 - fraction) / fraction
                yield PreparingReport(fraction_done=fraction, seconds_left=seconds_left)


def join_documents(documents: corpus.Documents) -> bytes:
    """Join documents with newlines."""
    return b"\n".join(b"".join(part[:] for part in document) for document in documents)
