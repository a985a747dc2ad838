"""Score one document as a stream: memory use does not grow with its length."""

from collections.abc import Iterator, Sequence

from tgen.config import raw
from tgen.corpus import Documents
from tgen.corpus.documents import Document
from tgen.corpus.parallel_tokenize import encode_pieces
from tgen.corpus.tokenize import split_documents
from tgen.errors import UsageError
from tgen.loaded_model import LoadedModel
from tgen.reports.score import Score
from tgen.scoring.scorer import ScoredTokens, Scorer
from tgen.scoring.units import ScoreTotals, count_blocks

_FEED = 4096  # ids passed to the engine at a time


class DocumentScorer(Scorer):
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
        super().__init__(model, len(document[-1]), stride=stride, n_blocks=n_blocks)
        self._document, self._start = document, start_ids(model)

    def compute(self) -> Iterator[ScoredTokens]:
        """Compute the score; yield the tokens that are in it, in blocks."""
        yield from self._score(self._feed(), 1 - len(self._start))

    def _feed(self) -> Iterator[Sequence[int]]:
        """Yield the ids of the document in small pieces, and remember them."""
        if self._start:
            yield self._remember(self._start, [False] * len(self._start))
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
                fed = whole[i : i + _FEED]
                yield self._remember(fed, [piece.in_loss] * len(fed))


def document_scorers(
    models: Sequence[LoadedModel], documents: Documents, *, stride: int | None
) -> Iterator[Sequence[Scorer]]:
    """Yield the scorers of each document, one per model."""
    length = max(model.engine.context_length for model in models)
    for document in documents:
        n_blocks = count_blocks(len(document[-1]), length)
        yield [
            DocumentScorer(model, document, stride=stride, n_blocks=n_blocks) for model in models
        ]


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
