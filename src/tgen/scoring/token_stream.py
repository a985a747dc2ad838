"""Score ids as a stream: memory use does not grow with their number."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.loaded_model import LoadedModel
from tgen.reports.score import TokenScore
from tgen.scoring.document_blocks import BlockSums
from tgen.scoring.totals import ScoreTotals


class ScoredTokens(NamedTuple):
    """Consecutive tokens of a document that are in its score."""

    ids: NDArray[np.int64]  # (n,)
    nats: NDArray[np.float64]  # (n,)
    ranks: NDArray[np.int64]  # (n,)
    positions: NDArray[np.int64]  # (n,): in the document
    contexts: NDArray[np.int64]  # (n,): tokens that predict each


class Scorer(ABC):
    """The scores of one document's tokens under a model."""

    n_replaced = 0  # characters that the tokenizer cannot express, replaced by U+FFFD
    is_normalized = False  # whether the tokenizer changed the text
    is_cut = False  # whether a part of it is too long to be scored

    def __init__(
        self, model: LoadedModel, n_bytes: int, *, stride: int | None, n_blocks: int
    ) -> None:
        """`n_bytes` are those of the text in the score."""
        self._model, self._stride = model, stride
        self._tokenizer = model.tokenizer
        self._fed: list[int] = []  # ids that the engine has and that are not scored yet
        self._counts: list[bool] = []  # which of them are in the score
        self._blocks = BlockSums(n_blocks, n_bytes)
        self._n_bytes = self._n_tokens = 0
        self._nats = 0.0

    @abstractmethod
    def compute(self) -> Iterator[ScoredTokens]:
        """Compute the score; yield the tokens that are in it, in blocks.

        Raises CorpusError and UsageError as `Tokenizer.encode_corpus`.
        """

    def tokens(self) -> Iterator[TokenScore]:
        """Compute the score; yield the tokens that are in it, in order. Errors as `compute`."""
        for block in self.compute():
            columns = (column.tolist() for column in block)
            for i, nats, rank, position, context in zip(*columns, strict=True):
                text = self._tokenizer.token_bytes(i)
                yield TokenScore(
                    position=position, id=i, text=text, logprob=-nats, rank=rank, context=context
                )

    def add_to(self, totals: ScoreTotals) -> None:
        """Add the computed score to those of other documents."""
        totals.add(
            self._nats, n_bytes=self._n_bytes, n_tokens=self._n_tokens, blocks=self._blocks.nats
        )

    @property
    def bytes_done(self) -> int:
        """Bytes of the tokens scored so far."""
        return self._blocks.n_bytes

    def _score(self, ids: Iterable[Sequence[int]], position: int) -> Iterator[ScoredTokens]:
        """Score the ids that `_remember` returned; `position` is that of the second one."""
        lengths = self._tokenizer.byte_lengths
        is_first = True
        for nats, ranks, context in self._model.score(ids, stride=self._stride):
            if is_first:
                self._drop(1)
                is_first = False
            counted, scored = np.array(self._counts[: len(nats)]), np.array(self._fed[: len(nats)])
            self._drop(len(nats))
            offsets = np.flatnonzero(counted)
            block = ScoredTokens(
                scored[offsets],
                nats[offsets],
                ranks[offsets],
                position + offsets,
                context + offsets,
            )
            position += len(nats)
            self._n_tokens += len(offsets)
            self._nats += float(block.nats.sum())
            self._blocks.add(block.nats, lengths[block.ids])
            yield block

    def _remember(self, ids: list[int], counted: Sequence[bool]) -> list[int]:
        self._fed += ids
        self._counts += counted
        return ids

    def _drop(self, n: int) -> None:
        del self._fed[:n], self._counts[:n]
