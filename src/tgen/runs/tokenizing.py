"""Split, sample and tokenize a corpus of texts; PreparedText is for conversations, too."""

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tgen import corpus, distributed
from tgen.checkpoint import model_dir
from tgen.checkpoint.chat_template import read_end_ids
from tgen.checkpoint.inherited_settings import InheritedSettings
from tgen.config.training import TrainConfig
from tgen.corpus import Corpus, Documents, Tokens
from tgen.corpus.parallel_tokenize import MODULE, first_message
from tgen.corpus.tokenize import split_documents
from tgen.errors import CorpusError
from tgen.machine.cpus import cpu_count
from tgen.machine.worker_pool import Message, map_messages
from tgen.planning.model_size import EXPLICIT
from tgen.planning.tokenizer_choice import choose_tokenizer
from tgen.reports.number_format import count
from tgen.reports.training import Choice, PhaseReport
from tgen.runs.request import RunRequest
from tgen.runs.run_record import ChatRecord
from tgen.storage.disk_array import blocks
from tgen.tokenizer import Tokenizer, make_tokenizer, train_words

_COMPARED_BYTES = 1 << 21
_COMPARED_SHARE = 8  # or an eighth of the text to train on
_MIN_VAL_BYTES, _VAL_BYTES_PER_MINUTE = 1 << 17, 1 << 20
_LARGE_OVERLAP = 0.05
_FEW_VAL_BYTES = 1 << 14
_FEW_ROWS, _FEW_ROW_BYTES = 8, 1 << 12  # if fewer of both would be held out, nothing is
_PARALLEL_BYTES = 1 << 24  # from this size on, several processes are faster
TOKENIZER_BYTES = 1 << 23  # text to train a tokenizer on
_PROMPT_BYTES = 1 << 16  # start of a document, to choose the sample prompt from
_REPORT_SECONDS = 1.0
_INHERITED = Choice("tokenizer", "inherited", "from the model to fine-tune")

T = TypeVar("T")
Phases = Generator[PhaseReport, None, T]


class PreparedText(NamedTuple):
    """A corpus of texts or of conversations as tokens, and what follows from it."""

    train: Tokens
    val: Tokens
    train_bytes: int  # bytes of target tokens
    held_out_bytes: int  # bytes of target tokens
    notes: list[str]
    tokenizer: Tokenizer
    sample_prompt: bytes
    tokenizer_choice: Choice = _INHERITED
    begin_of_text: int | None = None  # of texts: the id before each document
    whole_tokens: int | None = None  # of texts: estimate for all of the training set
    comparable: tuple[Documents, Documents] | None = None  # texts to measure other compressors on
    chat: ChatRecord | None = None
    context_length: int | None = None  # of conversations: tokens of a window
    inherited: InheritedSettings | None = None  # from the model to fine-tune
    longest_row: int = 0  # tokens of the longest prompt with its answer
    longest_text: int = 0  # tokens of the longest row, if all rows are texts
    n_answers: int = 0  # if all of the training set is such rows; otherwise 0

    @property
    def n_examples(self) -> int | None:
        """Number of conversations' examples to train on."""
        lengths = self.train.row_lengths
        return None if lengths is None else len(lengths)


class PhaseProgress:
    """Progress of a phase, reported once per second."""

    def __init__(self, phase: str, n_units: int, *, saved: bool = False) -> None:
        """`n_units` are bytes, tokens or 1 for all; if `saved`, the run is on disk."""
        self._start = PhaseReport(phase=phase, saved=saved)
        self._n_units = n_units
        self._started_at = self._reported_at = time.monotonic()
        self._n_done = 0.0

    def report(self, steps: Generator[float, None, T]) -> Phases[T]:
        """Run `steps`, which yields the number of processed units, and return its result; units of
        earlier calls count too."""
        yield self._start
        n_before = self._n_done
        while True:
            try:
                self._n_done = n_before + next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            now = time.monotonic()
            if self._n_done and now - self._reported_at >= _REPORT_SECONDS:
                self._reported_at = now
                fraction = self._n_done / self._n_units
                left = (now - self._started_at) * (1 - fraction) / fraction
                yield replace(self._start, fraction_done=fraction, seconds_left=left)


def hold_out(text: Corpus, config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Return the config that holds nothing out, and a note, if the corpus has so few prompts with
    answers that those held out would say little; a `val_fraction` that the user sets counts."""
    documents = text.documents
    # As `split_rows` and `split_train_val` do
    n_val = len(documents) / 4 if text.is_chat else len(documents) * config.val_fraction
    is_large = documents.n_bytes * config.val_fraction >= _FEW_ROW_BYTES
    if is_large or n_val >= _FEW_ROWS or "val_fraction" in config.changed:
        return config, []
    if not text.is_chat and any(len(document) < 2 for document in documents):
        return config, []
    n_rows = count(len(documents), "row")
    note = f"too few rows to hold any out ({n_rows}): all are trained on (see --val-fraction)"
    return replace(config, val_fraction=0.0), [note]


def row_lengths(train: Tokens, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], bool]:
    """Return the tokens of each prompt with its completion (r,), and whether the training set has
    them and nothing else. Without an end-of-text token, r is 0."""
    mask, end = train.loss_mask, tokenizer.end_of_text
    if mask is None or end is None:
        return np.zeros(0, np.int64), False
    lengths = corpus.document_lengths(train.ids, end)
    starts, first, masked = lengths.cumsum() - lengths, 0, [np.zeros(0, np.bool_)]
    for block in blocks(mask):
        here = slice(*starts.searchsorted([first, first + len(block)]))
        masked.append(block[starts[here] - first])
        first += len(block)
    is_row = ~np.concatenate(masked)
    return lengths[is_row], bool(is_row.all())


def max_val_bytes(config: TrainConfig) -> int:
    """Return the most held-out bytes of a run, which do not depend on the speed of the machine, so
    that runs can be compared on the same text."""
    if config.steps is not None:
        return corpus.MAX_VAL_BYTES
    in_time = round(config.minutes * _VAL_BYTES_PER_MINUTE)
    return min(corpus.MAX_VAL_BYTES, max(_MIN_VAL_BYTES, in_time))


def split_corpus(
    text: Corpus, config: TrainConfig, max_bytes: int, max_val_bytes: int, n_pieces: int
) -> tuple[Documents, Documents, int, list[str]]:
    """Split a corpus, and sample about `max_bytes` of the training set and `max_val_bytes` of the
    other, in `n_pieces` or more; return both splits, the bytes of the whole training set, and
    notes."""
    notes = [*text.notes]
    whole, held_out = _split(text, config)
    if not held_out:
        why = ""
        if config.val_fraction > 0.5:
            why = f"--val-fraction {config.val_fraction:g} leaves nothing to train on, so "
        elif config.val_fraction:
            why = "the corpus is too small to hold any of it out, so "
        notes.append(f"{why}no validation set: the last weights are saved, not the best")
    n_dropped, n_bytes = corpus.count_dropped(text, whole, held_out)
    if n_dropped:
        notes.append(f"copies of validation documents dropped: {n_dropped:,} ({n_bytes:,} bytes)")
    train = corpus.subsample_documents(whole, max_bytes, n_pieces=n_pieces)
    val = corpus.subsample_documents(held_out, max_val_bytes, n_pieces=n_pieces)
    if train is not whole:
        share = f"{100 * train.n_bytes / whole.n_bytes:.2g}%"
        why = "more would exceed the time budget" if config.steps is None else "enough for --steps"
        notes.append(
            f"trains on an evenly spaced sample of {train.n_bytes:,} bytes ({share}): {why}"
        )
    if 0 < val.n_bytes < _FEW_VAL_BYTES:
        notes.append(
            f"the validation set has only {count(val.n_bytes, 'byte')}, so its numbers are "
            "imprecise; --val-fraction 0 trains on everything and saves the last weights"
        )
    n_compared = min(_COMPARED_BYTES, max_bytes // _COMPARED_SHARE)
    samples = (
        join_documents(corpus.subsample_documents(documents, n_compared, n_pieces=n_pieces))
        for documents in (whole, val)
    )
    overlap = corpus.overlap_fraction(*samples)
    if overlap >= _LARGE_OVERLAP:
        share = "all" if overlap == 1 else f"at least {overlap:.0%}"
        notes.append(
            f"{share} of the validation set also occurs in the training text, in runs of 64 bytes "
            "or more: validation loss is too optimistic"
        )
    return train, val, whole.n_bytes, notes


def _split(text: Corpus, config: TrainConfig) -> tuple[Documents, Documents]:
    """Return all of the training set, and the validation set, which may be empty."""
    whole, held_out = corpus.split_train_val(text, config.val_fraction)
    if held_out and whole:
        return whole, held_out
    return text.documents, min(whole, held_out, key=len)


def training_texts(text: Corpus, config: TrainConfig, max_bytes: int, n_pieces: int) -> Documents:
    """Return the texts that a run trains on, as `split_corpus` does."""
    return corpus.subsample_documents(_split(text, config)[0], max_bytes, n_pieces=n_pieces)


def prepare_texts(
    request: RunRequest,
    source: model_dir.ModelBundle | None,
    text: Corpus,
    config: TrainConfig,
    *,
    max_bytes: int,
    folder: Path | None,
) -> Phases[PreparedText]:
    """Split texts, choose a tokenizer unless `source` has one, tokenize, and close the corpus.

    Raise CorpusError if nothing is to be learned.
    """
    train, val, whole_bytes, notes = split_corpus(
        text, config, max_bytes, max_val_bytes(config), corpus.PIECES
    )
    if source is None:
        yield PhaseReport(phase="training the tokenizer")
        n_sample = min(TOKENIZER_BYTES, max_bytes // 4)
        sample = corpus.subsample_documents(train, n_sample, n_pieces=corpus.PIECES)
        texts = [part[:] for document in sample for part in document]
        # Without <unk>, words that only the validation set has are tokens, too.
        parts = [train] if request.unk else [train, val]
        pieces = (piece for documents in parts for piece in split_documents(documents))
        words = ((piece.text, piece.starts_document) for piece in pieces)
        tokenizer, choice = train_tokenizer(request, texts, words, train.n_bytes)
    else:
        tokenizer, choice = source.tokenizer, _INHERITED
    begin_ids = corpus.begin_of_document(tokenizer)
    prepared = yield from tokenize_split(
        train, val, tokenizer, config, folder=folder, threads=request.threads, begin_ids=begin_ids
    )
    notes += prepared.notes
    if val and not prepared.held_out_bytes:
        notes.append("the held-out completions are empty: the last weights are saved")
    if prepared.train_bytes == 0:
        raise CorpusError(
            "the corpus has no completions to train on",
            "add --set loss_on=all to train on prompts",
        )
    if tokenizer.end_of_text is None:
        what = "the tokenizer has no end-of-text token, so the model never ends a text"
        notes.append(f"{what}: name one in tokenizer_config.json beside it (eos_token)")
    has_mask = prepared.train.loss_mask is not None or prepared.val.loss_mask is not None
    n_tokens = len(prepared.train.ids)
    lengths, all_rows = row_lengths(prepared.train, tokenizer)
    longest_text = 0
    if text.documents.is_row.all() and not len(lengths) and tokenizer.end_of_text is not None:
        text_lengths = corpus.document_lengths(prepared.train.ids, tokenizer.end_of_text)
        longest_text = int(text_lengths.max(initial=0))
    return prepared._replace(
        notes=notes,
        sample_prompt=tokenizer.make_expressible(_sample_prompt(val or train)),
        tokenizer_choice=choice,
        begin_of_text=begin_ids[0] if begin_ids else None,
        whole_tokens=round(n_tokens * whole_bytes / train.n_bytes),
        comparable=(train, val) if val and not has_mask else None,
        inherited=None if source is None else model_dir.inherited_settings(source),
        longest_row=int(lengths.max(initial=0)),
        longest_text=longest_text,
        n_answers=len(lengths) if all_rows else 0,
    )


def tokenize_split(
    train: Documents,
    val: Documents,
    tokenizer: Tokenizer,
    config: TrainConfig,
    *,
    folder: Path | None,
    threads: int | None,
    begin_ids: Sequence[int] = (),
) -> Phases[PreparedText]:
    """Tokenize the training and validation split, and close the corpus; yield progress.

    Use `threads` processes per rank for a large corpus; the other ranks must have called
    `broadcast_prepared`. `begin_ids` precede each document. Characters that the tokenizer cannot
    express are replaced and counted in the notes. Raise CorpusError if the corpus has changed since
    it was read.
    """
    progress = PhaseProgress("tokenizing", train.n_bytes + val.n_bytes)
    is_large = train.n_bytes >= _PARALLEL_BYTES
    if on_ranks := is_large and distributed.ranks().world_size > 1:
        call_ranks(MODULE, first_message(tokenizer), threads)
    train_tokens, train_bytes, n_replaced = yield from progress.report(
        corpus.tokenize_documents(
            train,
            tokenizer,
            loss_on=config.loss_on,
            begin_ids=begin_ids,
            open_end=train.open_end,
            folder=folder,
            processes=n_processes(threads) if is_large else 1,
            on_ranks=on_ranks,
        )
    )
    val_tokens, val_bytes, n_replaced_val = yield from progress.report(
        corpus.tokenize_documents(
            val, tokenizer, loss_on=config.loss_on, begin_ids=begin_ids, folder=folder
        )
    )
    train.close()
    notes = replacement_notes(n_replaced + n_replaced_val)
    return PreparedText(train_tokens, val_tokens, train_bytes, val_bytes, notes, tokenizer, b"")


def broadcast_prepared(value: Any) -> Any:
    """Return rank 0's value on all ranks, which tokenize for rank 0 until then."""
    while isinstance(result := distributed.broadcast(value), _Task):
        n = n_processes(result.threads)
        list(map_messages((), result.module, result.first, processes=n, on_ranks=True))
    return result


class _Task(NamedTuple):
    """Rank 0's request to the other ranks to tokenize a large corpus with it."""

    module: str  # of the workers
    first: Message
    threads: int | None


def call_ranks(module: str, first: Message, threads: int | None) -> None:
    """Let the other ranks, which must have called `broadcast_prepared`, answer the next messages
    with this one."""
    distributed.broadcast(_Task(module, first, threads))


def n_processes(threads: int | None) -> int:
    """Return the number of this rank's processes: `threads`, at most its share of the CPUs."""
    n_cpus = max(1, cpu_count() // distributed.ranks().local_world_size)
    return min(threads or n_cpus, n_cpus)


def replacement_notes(n: int) -> list[str]:
    """Return a note on `n` replaced characters of a corpus, or an empty list if `n` is 0."""
    if not n:
        return []
    what = count(n, "character")
    return [f"replaced {what} that the tokenizer cannot express by U+FFFD"]


def train_tokenizer(
    request: RunRequest, texts: list[bytes], words: Iterable[tuple[bytes, bool]], n_bytes: int
) -> tuple[Tokenizer, Choice]:
    """Train the request's tokenizer on `texts` of a split of `n_bytes`, or read it from its file.

    One of words is trained on `words`, all texts that it must encode, each with whether it starts
    a document.
    """
    kind, vocab_size, why = request.tokenizer, request.vocab_size, EXPLICIT
    if kind == "auto":
        alphabet = len(set(b"".join(texts)[: 1 << 20].decode("utf-8", errors="ignore")))
        kind, chosen, why = choose_tokenizer(n_bytes, alphabet)
        vocab_size = vocab_size or chosen
    if kind == "word":
        tokenizer = train_words(words, vocab_size=vocab_size, unknown=request.unk)
        return tokenizer, Choice("tokenizer", kind, why)
    tokenizer = make_tokenizer(kind, texts, vocab_size=vocab_size)
    if kind not in ("char", "bpe"):
        path = Path(kind)
        ends = read_end_ids(path if path.is_dir() else path.parent, tokenizer.added_tokens)
        tokenizer = Tokenizer(tokenizer.json, end_ids=ends)
    return tokenizer, Choice("tokenizer", kind, why)


def _sample_prompt(documents: Documents) -> bytes:
    """Return the first words of a document, or the end of the prompt of a prompt/completion row."""
    document = documents[0]
    if len(document) > 1:
        return document[0][-1000:]
    words = document[0][:_PROMPT_BYTES].lstrip()[:24].rsplit(None, 1)
    return words[0] if words else document[0][:24]


def join_documents(documents: Documents) -> bytes:
    """Join documents with newlines."""
    return b"\n".join(b"".join(part[:] for part in document) for document in documents)
