"""Score all documents of a corpus with one or two models."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tgen.corpus import Documents
from tgen.errors import UsageError
from tgen.loaded_model import LoadedModel
from tgen.reports.score import DocumentReport, TokenScore, TotalReport
from tgen.scoring.difference import compare
from tgen.scoring.document import DocumentScorer
from tgen.scoring.units import ScoreTotals, count_blocks


def score_documents(
    models: Sequence[LoadedModel],
    documents: Documents,
    *,
    stride: int | None = None,
    with_tokens: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> Iterator[TokenScore | DocumentReport | TotalReport]:
    """Yield the scores of each document, and of all together as the last report.

    With `with_tokens`, the tokens of a document precede its report; this needs a single model.
    `stride` is that of `generation.score.score_stream`. Raises CorpusError if a source has changed,
    and UsageError if the scores of two models are not of the same bytes.
    """
    context_length = max(model.engine.context_length for model in models)
    n_bytes = max(1, documents.n_bytes) * len(models)
    done = n_replaced = n_normalized = 0
    totals = [ScoreTotals() for _ in models]
    for number, document in enumerate(documents):
        n_blocks = count_blocks(len(document[-1]), context_length)
        own = [ScoreTotals() for _ in models]
        is_normalized = False
        for model, *sums in zip(models, totals, own, strict=True):
            scorer = DocumentScorer(model, document, stride=stride, n_blocks=n_blocks)
            for scored in scorer.tokens() if with_tokens else scorer.compute():
                progress(min(1.0, (done + scorer.bytes_done) / n_bytes))
                if isinstance(scored, TokenScore):
                    yield scored
            for one in sums:
                scorer.add_to(one)
            done += sum(map(len, document))
            n_replaced += scorer.n_replaced
            is_normalized |= scorer.is_normalized
        n_normalized += is_normalized
        yield DocumentReport(name=documents.name(number), **_scores(own))
    yield TotalReport(
        n_documents=len(documents),
        n_replaced=n_replaced,
        n_normalized=n_normalized,
        **_scores(totals),
    )


def _scores(totals: Sequence[ScoreTotals]) -> dict[str, Any]:
    """Return the fields of a ScoreReport."""
    first, *others = [one.score() for one in totals]
    if not others:
        return {"score": first, "other": None, "difference": None}
    (other,) = others
    if other.n_bytes != first.n_bytes:
        raise UsageError(
            f"the models score different parts of the text ({first.n_bytes:,} and "
            f"{other.n_bytes:,} bytes): one has no token before a text",
            "score the text with each model separately",
        )
    has_text = first.n_bytes > 0
    difference = compare(*(one.units() for one in totals)) if has_text else None
    return {"score": first, "other": other, "difference": difference}
