"""Score all texts of a corpus with one or two models: documents, and answers of conversations.

A document is scored as a stream: memory use does not grow with its length. A conversation is
rendered by the model's chat template as in training, and only its answers are scored.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tgen.chat.training_rows import EncodedRow, Row, RowEncoder, RowError
from tgen.config import raw
from tgen.corpus import Documents, parse_conversation
from tgen.corpus.document_table import Document
from tgen.corpus.parallel_tokenize import encode_pieces
from tgen.corpus.tokenize import split_documents
from tgen.errors import CorpusError, ModelError, UsageError
from tgen.loaded_model import LoadedModel
from tgen.reports.score import DocumentReport, Score, TokenScore, TotalReport
from tgen.scoring.document_blocks import count_blocks
from tgen.scoring.significance import compare
from tgen.scoring.token_stream import ScoredTokens, Scorer
from tgen.scoring.totals import ScoreTotals

_NO_TEMPLATE = 'choose a model with a chat template, or write {"text": "..."} rows'
_OTHER = "remove the row, or choose a model with another chat template"
_FEED = 4096  # ids passed to the engine at a time


class ConversationScorer(Scorer):
    """The scores of one conversation's answers, each up to the token that ends it."""

    def __init__(
        self, model: LoadedModel, row: EncodedRow, *, stride: int | None, n_blocks: int
    ) -> None:
        n_bytes = _target_bytes(model, row)
        super().__init__(model, n_bytes, stride=stride, n_blocks=n_blocks)
        self._row, self._n_bytes = row, n_bytes
        self.n_replaced, self.is_cut = row.n_replaced, row.cut

    def compute(self) -> Iterator[ScoredTokens]:
        """Compute the score; yield the tokens that are in it, in blocks."""
        for ids, loss_mask in self._row.examples:
            yield from self._score([self._remember(ids, loss_mask)], 1)
            self._drop(len(self._fed))


def conversation_scorers(
    models: Sequence[LoadedModel], documents: Documents, *, stride: int | None, length: int
) -> Iterator[Sequence[Scorer]]:
    """Yield the scorers of each conversation, one per model. Their blocks are at least
    as long as a context of `length` tokens.

    Raises ModelError for a model without a chat template, and CorpusError for a row that the
    template does not accept.
    """
    encoded = [_encode(model, documents) for model in models]
    try:
        for rows in zip(*encoded, strict=True):
            n_blocks = count_blocks(_target_bytes(models[0], rows[0]), length)
            yield [
                ConversationScorer(model, row, stride=stride, n_blocks=n_blocks)
                for model, row in zip(models, rows, strict=True)
            ]
    except RowError as error:
        row = documents.describe(error.row)
        raise CorpusError(f"{row}: {error.message}", _OTHER) from None


def _encode(model: LoadedModel, documents: Documents) -> Iterator[EncodedRow]:
    try:
        chat = model.chat_format
    except ModelError as error:
        raise ModelError(error.message, _NO_TEMPLATE) from None
    rows = (Row(*parse_conversation(line[:])) for (line,) in documents)
    first = Row(*parse_conversation(documents[0][0][:]))
    encoder = RowEncoder(chat, model.tokenizer, model.bundle.end_ids, first)
    # A window predicts as many tokens as the context has from the ones before them.
    return encoder.encode(rows, model.engine.context_length + 1)


def _target_bytes(model: LoadedModel, row: EncodedRow) -> int:
    """Return the bytes of the tokens in the loss."""
    lengths = model.tokenizer.byte_lengths
    return sum(int(lengths[np.array(ids)[np.array(mask)]].sum()) for ids, mask in row.examples)


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
    models: Sequence[LoadedModel], documents: Documents, *, stride: int | None, length: int
) -> Iterator[Sequence[Scorer]]:
    """Yield the scorers of each document, one per model; `length` as above."""
    for document in documents:
        n_blocks = count_blocks(len(document[-1]), length)
        yield [
            DocumentScorer(model, document, stride=stride, n_blocks=n_blocks) for model in models
        ]


def start_ids(model: LoadedModel) -> list[int]:
    """Return the tokens before a text; an empty list if the model has no such token."""
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


def score_documents(
    models: Sequence[LoadedModel],
    documents: Documents,
    *,
    chat: bool = False,
    stride: int | None = None,
    with_tokens: bool = False,
    length: int | None = None,
    totals: Sequence[ScoreTotals] = (),
    progress: Callable[[float], None] = lambda _: None,
) -> Iterator[TokenScore | DocumentReport | TotalReport]:
    """Yield the scores of each document, and of all together as the last report.

    With `chat`, the documents are conversations, of which the answers are scored, see
    `conversation_scorers`. With `with_tokens`, the tokens of a document precede its report; this
    needs a single model. `stride` is that of `generation.logprobs.score_stream`. `length` is the
    longest context of all models that are compared, and `totals` is filled, one per model: for
    comparisons of models that are scored one after the other. Raises CorpusError if a source has
    changed, and UsageError if the scores of two models are not of the same bytes.
    """
    n_bytes, sizes = max(1, documents.n_bytes) * len(models), documents.sizes
    done = n_replaced = n_normalized = n_cut = 0
    totals = totals or [ScoreTotals() for _ in models]
    length = length or max(model.engine.context_length for model in models)
    of_documents = conversation_scorers if chat else document_scorers
    for number, scorers in enumerate(of_documents(models, documents, stride=stride, length=length)):
        own = [ScoreTotals() for _ in models]
        for scorer, *sums in zip(scorers, totals, own, strict=True):
            for scored in scorer.tokens() if with_tokens else scorer.compute():
                progress(min(1.0, (done + scorer.bytes_done) / n_bytes))
                if isinstance(scored, TokenScore):
                    yield scored
            for one in sums:
                scorer.add_to(one)
            done += int(sizes[number])
            n_replaced += scorer.n_replaced
        n_normalized += any(scorer.is_normalized for scorer in scorers)
        n_cut += any(scorer.is_cut for scorer in scorers)
        yield DocumentReport(name=documents.name(number), **_scores(own, chat=chat))
    yield TotalReport(
        n_documents=len(documents),
        n_replaced=n_replaced,
        n_normalized=n_normalized,
        n_cut=n_cut,
        **_scores(totals, chat=chat),
    )


def _scores(totals: Sequence[ScoreTotals], *, chat: bool) -> dict[str, Any]:
    """Return the fields of a ScoreReport."""
    first, *others = [one.score() for one in totals]
    if not others:
        return {"score": first, "other": None, "difference": None}
    (other,) = others
    if other.n_bytes != first.n_bytes:
        reason = "their chat templates differ" if chat else "one has no token before a text"
        raise UsageError(
            f"the models score different parts of the text ({first.n_bytes:,} and "
            f"{other.n_bytes:,} bytes): {reason}",
            "score the text with each model separately",
        )
    has_text = first.n_bytes > 0
    difference = compare(*(one.units() for one in totals)) if has_text else None
    return {"score": first, "other": other, "difference": difference}
