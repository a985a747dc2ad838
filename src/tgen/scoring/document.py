"""Score one document as a stream: memory use does not grow with its length."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import raw
from tgen.corpus.documents import Document
from tgen.corpus.parallel_tokenize import encode_pieces
from tgen.corpus.tokenize import split_documents
from tgen.errors import UsageError
from tgen.loaded_model import LoadedModel
from tgen.reports.score import Score, TokenScore
from tgen.scoring.units import BlockSums, ScoreTotals

_FEED = 4096  # ids passed to the engine at a time


class ScoredTokens(NamedTuple):
    """Consecutive tokens of a document that are in its score."""

    ids: NDArray[np.int64]  # (n,)
    nats: NDArray[np.float64]  # (n,)
    ranks: NDArray[np.int64]  # (n,)
    positions: NDArray[np.int64]  # (n,): in the document
    contexts: NDArray[np.int64]  # (n,): tokens that predict each


class DocumentScorer:
    """The scores of one document's tokens under a model.

    The document follows the tokens before a text: beginning-of-text tokens or, for models without
    one, an end-of-text token. Of several parts only the last is scored, the completion of a prompt.
    """

    def __init__(
        self,
        model: LoadedModel,
        document: Document,
        *,
        stride: int | None = None,
        n_blocks: int = 1,
    ) -> None:
        """`stride` is that of `score_stream`, `n_blocks` the number of parts for `BlockSums`."""
        self._model, self._document, self._stride = model, document, stride
        self._tokenizer = model.tokenizer
        self._start = start_ids(model)
        self._fed: list[int] = []  # ids that the engine has and that are not scored yet
        self._counts: list[bool] = []  # which of them are in the score
        self._blocks = BlockSums(n_blocks, len(document[-1]))
        self._n_bytes = self._n_tokens = 0
        self._nats = 0.0
        self.n_replaced = 0  # characters that the tokenizer cannot express, replaced by U+FFFD
        self.is_normalized = False  # whether the tokenizer changed the text

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

    def compute(self) -> Iterator[ScoredTokens]:
        """Compute the score; yield the tokens that are in it, in blocks.

        Raises CorpusError and UsageError as `Tokenizer.encode_corpus`.
        """
        lengths = self._tokenizer.byte_lengths
        position = 1 - len(self._start)  # of the first token that the stream scores
        is_first = True
        for nats, ranks, context in self._model.score(self._feed(), stride=self._stride):
            if is_first:
                self._drop(1)
                is_first = False
            counted, ids = np.array(self._counts[: len(nats)]), np.array(self._fed[: len(nats)])
            self._drop(len(nats))
            offsets = np.flatnonzero(counted)
            block = ScoredTokens(
                ids[offsets],
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

    def _feed(self) -> Iterator[Sequence[int]]:
        """Yield the ids of the document in small pieces, and remember them."""
        if self._start:
            yield self._remember(self._start, counted=False)
        is_first = not self._start
        pieces = split_documents([self._document])
        for piece, ids, n_replaced in encode_pieces(pieces, self._tokenizer):
            whole: list[int] = ids.tolist()
            if n_replaced:
                self.n_replaced += n_replaced
            elif not self.is_normalized:
                decoded = self._tokenizer.decode(whole, continuation=not piece.starts_document)
                self.is_normalized = decoded != piece.text
            if piece.in_loss:
                self._n_bytes += len(piece.text)
                if is_first and whole:  # nothing predicts the first token
                    self._n_bytes -= len(self._tokenizer.decode(whole[:1]))
            is_first = is_first and not whole
            for i in range(0, len(whole), _FEED):
                yield self._remember(whole[i : i + _FEED], counted=piece.in_loss)

    def _remember(self, ids: list[int], *, counted: bool) -> list[int]:
        self._fed += ids
        self._counts += [counted] * len(ids)
        return ids

    def _drop(self, n: int) -> None:
        del self._fed[:n], self._counts[:n]


def start_ids(model: LoadedModel) -> list[int]:
    """Return the tokens before a text; none if the model has no such token."""
    return model.tokenizer.encode_prompt(b"")


def score_text(model: LoadedModel, text: str | bytes, *, stride: int | None = None) -> Score:
    """Return the score of a text, in which `<|endoftext|>` is text.

    Raises UsageError for an empty text, and for what the tokenizer cannot express.
    """
    if not text:
        raise UsageError("no text to score", "pass at least one byte")
    model.encode(text)  # raises the errors of a prompt
    scorer, totals = DocumentScorer(model, (raw(text),), stride=stride), ScoreTotals()
    for _ in scorer.compute():
        pass
    scorer.add_to(totals)
    return totals.score()
