"""The models of several runs on one text, each compared with the best."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tgen.corpus import Corpus
from tgen.errors import TgenError
from tgen.loaded_model import LoadedModel
from tgen.reports.comparison import RunSummary, TextScore
from tgen.reports.number_format import count
from tgen.reports.score import TotalReport
from tgen.scoring import score_documents
from tgen.scoring.significance import compare
from tgen.scoring.totals import ScoreTotals


def score_runs(
    runs: Sequence[RunSummary],
    warn: Callable[[str], None],
    *,
    corpus: Corpus,
    open_model: Callable[[Path], LoadedModel],
    progress: Callable[[float], None] = lambda _: None,
) -> dict[str, TextScore]:
    """Return the scores by the paths of the runs, one model in memory at a time.

    Runs without a model, those whose model cannot read the text, and those of which other bytes are
    scored, are left out with a warning.
    """
    length = max(run.settings["context_length"] for run in runs)
    scored: dict[str, ScoreTotals] = {}
    for i, run in enumerate(runs):
        totals = ScoreTotals()

        def update(fraction: float, done: int = i) -> None:
            progress((done + fraction) / len(runs))

        try:
            reports = score_documents(
                [open_model(Path(run.path))],
                corpus.documents,
                chat=corpus.is_chat,
                length=length,
                totals=[totals],
                progress=update,
            )
            (report,) = deque(reports, maxlen=1)
        except TgenError as error:  # for example a word that its tokenizer lacks
            warn(f"{run.name} is not scored: {error.message}")
            continue
        assert isinstance(report, TotalReport)
        if report.n_replaced:
            n = count(report.n_replaced, "character")
            warn(f"{run.name}: {n} that its tokenizer cannot express replaced by U+FFFD")
        if report.n_cut:
            warn(f"{run.name}: answers of {count(report.n_cut, 'row')} do not fit its context")
        scored[run.path] = totals
    sizes = {path: totals.score().n_bytes for path, totals in scored.items()}
    for run in runs:
        if run.path in sizes and sizes[run.path] != max(sizes.values()):
            warn(f"{run.name} is not scored: other bytes of the text are its targets")
            del scored[run.path]
    units = {path: totals.units() for path, totals in scored.items()}
    best = min(units, key=lambda path: float(units[path].nats.sum()), default="")
    return {
        path: TextScore(
            score=scored[path].score(),
            difference=None if path == best else compare(units[path], units[best]),
        )
        for path in scored
    }
