"""Score the answers of conversations, which the model's chat template renders as in training."""

from collections.abc import Iterator, Sequence

import numpy as np

from tgen.chat.training_rows import EncodedRow, Row, RowEncoder, RowError
from tgen.corpus import Documents, parse_conversation
from tgen.errors import CorpusError, ModelError
from tgen.loaded_model import LoadedModel
from tgen.scoring.scorer import ScoredTokens, Scorer
from tgen.scoring.units import count_blocks

_NO_TEMPLATE = 'choose a model with a chat template, or write {"text": "..."} rows'
_OTHER = "remove the row, or choose a model with another chat template"


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
    models: Sequence[LoadedModel], documents: Documents, *, stride: int | None
) -> Iterator[Sequence[Scorer]]:
    """Yield the scorers of each conversation, one per model.

    Raises ModelError for a model without a chat template, and CorpusError for a row that the
    template does not accept.
    """
    length = max(model.engine.context_length for model in models)
    encoded = [_encode(model, documents) for model in models]
    try:
        for rows in zip(*encoded, strict=True):
            n_blocks = count_blocks(_target_bytes(models[0], rows[0]), length)
            yield [
                ConversationScorer(model, row, stride=stride, n_blocks=n_blocks)
                for model, row in zip(models, rows, strict=True)
            ]
    except RowError as error:
        row = documents.table.describe(int(documents.numbers[error.row]))
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
