"""Split the corpus into training and validation text, and tokenize both."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tgen import corpus
from tgen.config.training import TrainConfig
from tgen.corpus import TokenizedCorpus
from tgen.errors import CorpusError, TrainingError
from tgen.machine.cpus import cpu_count
from tgen.reports.number_format import count
from tgen.reports.training import PhaseReport
from tgen.runs import saved_state
from tgen.runs.chat_rows import tokenize_rows
from tgen.runs.run_record import RunRecord
from tgen.runs.tokenizing import PhaseProgress, PreparedText
from tgen.tokenizer import Tokenizer

_COMPARED_BYTES = 1 << 21
_LARGE_OVERLAP = 0.05
_FEW_VAL_BYTES = 1 << 14
_PARALLEL_BYTES = 1 << 24  # from this size on, several processes are faster


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
    notes += [
        f"{name} has rows but is trained on as plain text: {hint}"
        for name, hint in text.misnamed.items()
    ]
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
    begin_ids: Sequence[int] = (),
) -> Generator[PhaseReport, None, tuple[TokenizedCorpus, TokenizedCorpus]]:
    """Tokenize the training and validation split, and close the corpus; yield progress.

    Use `threads` processes for a large corpus. `begin_ids` precede each document. Characters that
    the tokenizer cannot express are replaced and counted in the notes. Raise CorpusError if the
    corpus has changed since it was read.
    """
    progress = PhaseProgress("tokenizing", split.train.n_bytes + split.val.n_bytes)
    n_cpus = cpu_count()
    is_large = split.train.n_bytes >= _PARALLEL_BYTES
    train = yield from progress.report(
        corpus.tokenize_documents(
            split.train,
            tokenizer,
            loss_on=config.loss_on,
            begin_ids=begin_ids,
            open_end=split.train_continues,
            folder=folder,
            processes=min(threads or n_cpus, n_cpus) if is_large else 1,
        )
    )
    progress.units_before = split.train.n_bytes
    val = yield from progress.report(
        corpus.tokenize_documents(
            split.val, tokenizer, loss_on=config.loss_on, begin_ids=begin_ids, folder=folder
        )
    )
    split.corpus.close()
    if n_replaced := train.n_replaced + val.n_replaced:
        split.notes.append(
            f"replaced {count(n_replaced, 'character')} that the tokenizer cannot express by U+FFFD"
        )
    return train, val


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
    again = yield from _tokenize_again(out, text, record, tokenizer)
    arrays = corpus.token_arrays(again.train, again.val)
    name = tokens_entry.get("name", saved_state.TOKENS_FILE)
    if saved_state.save_tokens(out, record.to_dict(), arrays, name=name) != tokens_entry:
        raise TrainingError(
            f"the corpus does not produce the tokens that the run in {out} started with",
            "check the version of the tokenizers library; " + saved_state.recovery_hint(out),
        )


def _tokenize_again(
    out: Path, text: corpus.Corpus, record: RunRecord, tokenizer: Tokenizer
) -> Generator[PhaseReport, None, PreparedText]:
    """Tokenize a corpus as the run in `out` did."""
    config, folder = record.plan.train, saved_state.folder(out)
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
            )
        )
    split = split_corpus(text, config, record.read_bytes)
    begin_ids = () if record.begin_of_text is None else corpus.begin_of_document(tokenizer)
    train, val = yield from tokenize_split(
        split, tokenizer, config, folder=folder, threads=record.threads, begin_ids=begin_ids
    )
    return PreparedText(train, val, split.notes, record.sample_prompt)


def tokenize_new_corpus(
    out: Path, text: corpus.Corpus, names: list[str], record: RunRecord, tokenizer: Tokenizer
) -> Generator[PhaseReport, None, tuple[RunRecord, dict[str, Any]]]:
    """Tokenize another corpus for the run in `out`; return its record and tokens entry.

    The tokens are written beside the old ones, which stay in use until the record is saved. Raise
    CorpusError if the corpus is too short.
    """
    if text.is_chat != (record.chat is not None):
        raise CorpusError(
            f"the run in {out} trains on {'text' if text.is_chat else 'conversations'}, but the "
            f"new corpus has {'conversations' if text.is_chat else 'text'}",
            "start a new run with another --out",
        )
    again = yield from _tokenize_again(out, text, record, tokenizer)
    train, val = again.train, again.val
    is_short = len(train.tokens) <= record.plan.context_length
    if record.chat is None and (is_short or train.target_bytes == 0):
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
        chat=again.chat,
        sample_prompt=again.sample_prompt,
        plan=replace(record.plan, notes=again.notes),
    )
    arrays = corpus.token_arrays(train, val)
    name = f"tokens-{record.corpus_changes}.safetensors"
    return record, saved_state.save_tokens(out, record.to_dict(), arrays, name=name)


def join_documents(documents: corpus.Documents) -> bytes:
    """Join documents with newlines."""
    return b"\n".join(b"".join(part[:] for part in document) for document in documents)
