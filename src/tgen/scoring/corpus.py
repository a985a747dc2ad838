"""Score all documents of a corpus with one or two models."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tgen.corpus import Documents
from tgen.errors import UsageError
from tgen.loaded_model import LoadedModel
from tgen.reports.score import DocumentReport, TokenScore, TotalReport
from tgen.scoring.conversation import conversation_scorers
from tgen.scoring.difference import compare
from tgen.scoring.document import document_scorers
from tgen.scoring.units import ScoreTotals


def score_documents(
    models: Sequence[LoadedModel],
    documents: Documents,
    *,
    chat: bool = False,
    stride: int | None = None,
    with_tokens: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> Iterator[TokenScore | DocumentReport | TotalReport]:
    """Yield the scores of each document, and of all together as the last report.

    With `chat`, the documents are conversations, of which the answers are scored, see
    `conversation_scorers`. With `with_tokens`, the tokens of a document precede its report; this
    needs a single model. `stride` is that of `generation.score.score_stream`. Raises CorpusError if
    a source has changed, and UsageError if the scores of two models are not of the same bytes.
    """
    n_bytes, sizes = max(1, documents.n_bytes) * len(models), documents.sizes
    done = n_replaced = n_normalized = n_cut = 0
    totals = [ScoreTotals() for _ in models]
    of_documents = conversation_scorers if chat else document_scorers
    for number, scorers in enumerate(of_documents(models, documents, stride=stride)):
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
