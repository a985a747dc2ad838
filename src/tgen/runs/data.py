"""From the corpus to what is trained on and what is held out, as text and as tokens."""

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from tgen import corpus
from tgen.config import TrainConfig
from tgen.corpus import TokenizedCorpus
from tgen.model.cpu_count import cpu_count
from tgen.reports import PreparingReport
from tgen.tokenizer import Tokenizer

_COMPARED_BYTES = 1 << 21
_MUCH_SHARED = 0.05
_TOO_FEW_HELD_OUT = 1 << 14  # bytes
_LARGE = 1 << 24  # bytes from which processes of their own pay
_REPORT_EVERY = 1.0  # seconds


class Texts(NamedTuple):
    """What is trained on and what is held out, as much of both as the time allows."""

    corpus: corpus.Corpus
    train: Sequence[corpus.Document]
    held_out: Sequence[corpus.Document]
    train_goes_on: bool  # its last document does, in the held-out text
    notes: list[str]
    whole_bytes: int  # to train on, without regard to the time


def split(text: corpus.Corpus, config: TrainConfig, most: int) -> Texts:
    """Splits a corpus; of the text to train on at most about `most` bytes are used."""
    notes = [f"skipped {name}: it does not look like text" for name in text.skipped]
    parts = corpus.train_val_split(text, config.val_fraction)
    if not parts.held_out or not parts.train:
        parts = corpus.Split(text.documents, [])
        notes.append("nothing is held out: the last weights are kept, not the best")
    if parts.left_out:
        notes.append(
            f"copies of what is held out are left out: {parts.left_out:,} "
            f"({parts.left_out_bytes:,} bytes)"
        )
    train = corpus.subsample(parts.train, most)
    held_out = corpus.subsample(parts.held_out, corpus.MAX_HELD_OUT_BYTES)
    whole = total(parts.train)
    if train is not parts.train:
        n_bytes = total(train)
        notes.append(f"{n_bytes:,} bytes, evenly spread, are as much as the time allows to read")
    n_bytes = total(held_out)
    if 0 < n_bytes < _TOO_FEW_HELD_OUT:
        notes.append(
            f"only {n_bytes:,} bytes are held out: take the figures as rough ones; with "
            "--val-fraction 0 all is learnt, and the last weights are kept"
        )
    some = [joined(corpus.subsample(part, _COMPARED_BYTES)) for part in (parts.train, held_out)]
    share = corpus.overlap_fraction(*some)
    if share >= _MUCH_SHARED:
        notes.append(
            f"at least {share:.0%} of the held-out text is also in the text to train on, in runs "
            "of 64 bytes and more: its figures flatter"
        )
    return Texts(text, train, held_out, parts.cut and train is parts.train, notes, whole)


def tokenised(
    texts: Texts,
    tokenizer: Tokenizer,
    config: TrainConfig,
    *,
    folder: Path | None,
    threads: int | None,
) -> Generator[PreparingReport, None, tuple[TokenizedCorpus, TokenizedCorpus]]:
    """Both as tokens, and how far it is where that takes seconds; a large text is tokenised by as
    many processes as there may be threads. See `corpus.tokenising`.

    Raises CorpusError where the corpus has changed since it was read.
    """
    n_bytes = total(texts.train)
    clock = _Clock(n_bytes + total(texts.held_out))
    most = cpu_count()
    train = yield from clock.reported(
        corpus.tokenising(
            texts.train,
            tokenizer,
            loss_on=config.loss_on,
            open_end=texts.train_goes_on,
            folder=folder,
            processes=min(threads or most, most) if n_bytes >= _LARGE else 1,
        )
    )
    clock.before = n_bytes
    held_out = yield from clock.reported(
        corpus.tokenising(texts.held_out, tokenizer, loss_on=config.loss_on, folder=folder)
    )
    texts.corpus.close()
    return train, held_out


class _Clock:
    """Turns bytes that are done into reports, one a second."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._began = self._said = time.monotonic()
        self.before = 0  # bytes of what was done earlier

    def reported(
        self, steps: Generator[int, None, TokenizedCorpus]
    ) -> Generator[PreparingReport, None, TokenizedCorpus]:
        """Takes the steps to their end."""
        while True:
            try:
                done = self.before + next(steps)
            except StopIteration as end:
                result: TokenizedCorpus = end.value
                return result
            now = time.monotonic()
            if now - self._said >= _REPORT_EVERY:
                self._said = now
                fraction = done / self._n_bytes
                seconds_left = (now - self._began) * (1 - fraction) / fraction
                yield PreparingReport(fraction_done=fraction, seconds_left=seconds_left)


def total(documents: Sequence[corpus.Document]) -> int:
    """Bytes of all documents."""
    return int(corpus.sizes(documents).sum())


def joined(documents: Sequence[corpus.Document]) -> bytes:
    """The documents as lines of one text."""
    return b"\n".join(b"".join(part[:] for part in document) for document in documents)
