"""One training run from the corpus to the model directory, as an iterator of reports.

    for report in start(RunRequest(corpus=["corpus.txt"], out=Path("models/corpus"))): ...

The newest state and the best weights are on disk whenever an EvalReport or the DoneReport arrives.
"""

from tgen.runs.prepare import RunRequest
from tgen.runs.run import dry_run, resume, start

__all__ = ["RunRequest", "dry_run", "resume", "start"]
