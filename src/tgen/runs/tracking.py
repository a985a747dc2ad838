"""Metrics of a run in Weights & Biases or trackio, through their own libraries.

Both write to local files; only `wandb:online` lets its library use the network. Their defaults say
where the files are: WANDB_DIR, TRACKIO_DIR.
"""

import os
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

from tgen.errors import UsageError
from tgen.planning.costs import n_parameters
from tgen.reports.training import EvalReport, RunReport, StepReport
from tgen.runs.request import Log
from tgen.runs.run_record import RunRecord
from tgen.runs.tensorboard import scalars

_PROJECT = "tgen"


def require(log: Log) -> None:
    """Raise UsageError if the library is missing, or has no login that it needs; call it before
    training."""
    package, _, mode = log.partition(":")
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a directory with logs may have its name
        raise UsageError(f"--log {log}: the package {package} is missing", f"pip install {package}")
    if mode and not _has_login(_import(log)):
        raise UsageError(f"--log {log}: wandb is not logged in", "run: wandb login")


def _has_login(library: Any) -> bool:
    """Return whether wandb has a key, for which it would ask otherwise."""
    try:
        return bool(library.login(prompt=False, verify=False))
    except TypeError:  # an older version
        return bool(library.api.api_key)


class Tracker:
    """One session of a run in the library's log; a later session continues it."""

    def __init__(self, log: Log, record: RunRecord, title: str, after_step: int) -> None:
        """Open the log; raise OSError if the library fails."""
        self.name = f"the log of {log}"
        plan, self._library = record.plan, _import(log)
        config = asdict(plan.model) | asdict(plan.train) | {"parameters": n_parameters(plan.model)}
        values: dict[str, Any] = {"project": _PROJECT, "name": title, "config": config}
        if log == "trackio":  # knows runs by their names, which other runs may have had
            values["resume"] = "allow" if after_step else "never"
        else:
            mode = "online" if log.endswith(":online") else "offline"
            values |= {"id": record.run_id, "resume": "allow", "mode": mode}
        _call(self._library.init, **values)

    def add(self, report: RunReport) -> None:
        """Log the numbers of a report."""
        if isinstance(report, StepReport | EvalReport):
            _call(self._library.log, scalars(report), step=report.step)

    def close(self) -> None:
        """Write what is buffered."""
        _call(self._library.finish)


def _import(log: Log) -> Any:
    if not log.endswith(":online"):  # reports of the library's own errors, and usage statistics
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "GRADIO_ANALYTICS_ENABLED": "False"}
    os.environ.setdefault("WANDB_SILENT", "true")
    with redirect_stdout(StringIO()):
        return import_module(log.partition(":")[0])


def _call(function: Any, *values: Any, **options: Any) -> Any:
    """Call the library, which prints on stdout; its errors become OSError."""
    try:
        with redirect_stdout(StringIO()):
            return function(*values, **options)
    except Exception as error:
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error
