"""Compare runs: what differs in their settings, and their held-out losses, alone and in groups.

Nothing is written. A run that cannot be compared is left out with a warning.
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np

from tgen.errors import TgenError, TrainingError, UsageError, suggest
from tgen.experiments.intervals import mean_interval
from tgen.experiments.run_summary import CHOSEN_BY_SPEED, summarize_run
from tgen.reports.comparison import (
    ComparisonReport,
    GroupSummary,
    MeanCurve,
    MeanInterval,
    RunSummary,
    Scale,
    TextScore,
)
from tgen.runs import saved_state

_MAX_POINTS = 200  # of a group's curve
_LISTED = 5  # names in a warning
_COSTS = ("n_parameters", "steps", "tokens", "seconds", "flop")
_NOTED = {"stopped": "stopped before the end", "unfinished": "not finished", "diverged": "diverged"}
_BY_CHANCE = ("seed", *CHOSEN_BY_SPEED)  # settings that differ between repetitions
Score = Callable[[Sequence[RunSummary], Callable[[str], None]], Mapping[str, TextScore]]


def compare_runs(
    paths: Sequence[str | Path],
    *,
    by: Sequence[str] = (),
    score: Score | None = None,
) -> ComparisonReport:
    """Return the comparison of the runs that `paths` name, the best first.

    A path is the directory of a run, a directory of such directories, or a glob pattern. `by` are
    settings whose values make the groups. `score` returns the scores of the models on a text by the
    paths of their runs; it can add warnings. Raises UsageError for a path that does not exist, a
    pattern that matches nothing and an unknown setting, TrainingError if no run is left.
    """
    folders, warnings = _find_runs(paths)
    runs = []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            runs.append(summarize_run(folder, name))
        except TgenError as error:
            warnings.append(f"{name} is left out: {error.message}")
        except OSError as error:
            warnings.append(f"{name} is left out: {error.strerror or error}")
    if not runs:
        raise TrainingError(warnings[-1], "name directories that `tgen train` wrote")
    _check_settings(by, runs)
    scores = score(runs, warnings.append) if score else {}
    runs = [replace(run, text=scores.get(run.path)) for run in runs]
    texts = list(dict.fromkeys(run.held_out for run in runs))
    runs.sort(key=lambda run: _rank(texts, run, run.best, run.text_bits))
    differing = _differing(runs)
    columns = _columns(runs, differing)
    members = _members(runs, by) if by else []
    groups = [_summarize_group(group, by) for group in members]
    groups.sort(key=lambda one: _rank(texts, one, _center(one.best), _center(one.text)))
    return ComparisonReport(
        runs=runs,
        differing=differing,
        columns=columns,
        configurations=_configurations(runs, columns),
        by=list(by),
        groups=groups,
        warnings=[*warnings, *_warnings(runs, by, members, columns)],
    )


def _rank(
    texts: Sequence[str], one: RunSummary | GroupSummary, best: float | None, text: float | None
) -> tuple[float, ...]:
    """Return a key that sorts by the loss on the scored text or, without it, by held-out text."""
    if text is not None:
        return -1, 0, text
    return texts.index(one.held_out), best is None, best or 0.0


def _center(interval: MeanInterval | None) -> float | None:
    return None if interval is None else interval.mean


def _find_runs(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the directories of runs, each once, and warnings. Raises as `compare_runs`."""
    found: dict[Path, Path] = {}  # by the path without links
    warnings: dict[str, None] = {}  # each once
    for folder in (folder for path in paths for folder in _expand(str(path))):
        if found.setdefault(folder.resolve(), folder) is not folder:
            warnings[f"{folder} is named twice: it counts once"] = None
    return [*found.values()], [*warnings]


def _expand(path: str) -> Iterator[Path]:
    """Yield the directories of runs that a path names."""
    if os.path.lexists(path):
        folder = Path(path)
        if saved_state.has_run(folder):
            yield folder
        else:
            inside = sorted(one for one in folder.glob("*") if saved_state.has_run(one))
            yield from inside or [folder]
        return
    if not glob.has_magic(path):
        raise UsageError(f"{path} does not exist", "name the directory of a run")
    folders = [one for one in sorted(glob.glob(path, recursive=True)) if os.path.isdir(one)]
    if not folders:
        raise UsageError(f"no directory matches {path!r}", "check the pattern")
    for one in folders:
        yield from _expand(one)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the paths from the directory that all have in common."""
    absolute = [os.path.abspath(folder) for folder in folders]
    if len(absolute) < 2:
        return [Path(one).name for one in absolute]
    try:
        common = os.path.commonpath([os.path.dirname(one) for one in absolute])
    except ValueError:  # on several drives
        return absolute
    return [os.path.relpath(one, common) for one in absolute]


def _check_settings(names: Sequence[str], runs: Sequence[RunSummary]) -> None:
    """Raise UsageError for a setting that no run has."""
    known = dict.fromkeys(name for run in runs for name in run.settings)
    for name in names:
        if name not in known:
            hint = suggest(name, known) or f"choose one of {', '.join(known)}"
            raise UsageError(f"--by {name}: not a setting of these runs", hint)


def _differing(runs: Sequence[RunSummary]) -> list[str]:
    """Return the settings that are not equal in all runs, without those of the model that follow
    from its family and shape in every run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: {repr(run.settings.get(name)) for run in runs} for name in names}
    implied = set.intersection(*(set(run.implied) for run in runs))
    return [name for name in names if len(values[name]) > 1 and name not in implied]


def _columns(runs: Sequence[RunSummary], differing: Sequence[str]) -> list[str]:
    """Return the first settings that tell apart runs which those before do not."""
    columns: list[str] = []
    n_parts = 1
    for name in differing:
        n = len({_values(run, [*columns, name]) for run in runs})
        if n > n_parts:
            columns.append(name)
            n_parts = n
    return columns


def _values(run: RunSummary, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(repr(run.settings.get(name)) for name in names)


def _configurations(runs: Sequence[RunSummary], columns: Sequence[str]) -> list[int]:
    """Return a number per run, equal for runs that differ in nothing but chance and speed."""
    names = [name for name in columns if name not in _BY_CHANCE]
    keys = [_values(run, names) for run in runs]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _members(runs: Sequence[RunSummary], by: Sequence[str]) -> list[list[RunSummary]]:
    """Return the finished runs with the same held-out text by their settings, copies once."""
    members: dict[tuple[str, ...], list[RunSummary]] = {}
    for run in runs:
        if run.state == "finished":
            group = members.setdefault((run.held_out, *_values(run, by)), [])
            if not any(_is_repeated(run, other) for other in group):
                group.append(run)
    return list(members.values())


def _is_repeated(run: RunSummary, other: RunSummary) -> bool:
    """Whether a run is a copy, or was repeated with the same seed and the same result."""
    same = run.settings == other.settings and run.curve.bits_per_byte == other.curve.bits_per_byte
    return run.run_id == other.run_id or (same and run.best is not None)


def _summarize_group(group: Sequence[RunSummary], by: Sequence[str]) -> GroupSummary:
    costs: dict[str, Any] = {name: fmean(getattr(run, name) for run in group) for name in _COSTS}
    return GroupSummary(
        values={name: group[0].settings.get(name) for name in by},
        held_out=group[0].held_out,
        runs=[run.name for run in group],
        **costs,
        best=_interval([run.best for run in group]),
        final=_interval([run.final for run in group]),
        text=_interval([run.text_bits for run in group]),
        curves={scale: _mean_curve(group, scale) for scale in get_args(Scale)},
    )


def _interval(values: Sequence[float | None]) -> MeanInterval | None:
    """Return the mean over all runs; None if one has no value."""
    known = [value for value in values if value is not None]
    return mean_interval(known) if known and len(known) == len(values) else None


def _mean_curve(group: Sequence[RunSummary], scale: Scale) -> MeanCurve:
    """Return the mean between the latest first and the earliest last evaluation.

    Losses between two evaluations of a run are interpolated.
    """
    series = [(getattr(run.curve, scale), run.curve.bits_per_byte) for run in group]
    if not all(x for x, _ in series):
        return MeanCurve(x=[], intervals=[])
    start, end = max(x[0] for x, _ in series), min(x[-1] for x, _ in series)
    grid = np.unique([one for x, _ in series for one in x if start <= one <= end])
    if len(grid) > _MAX_POINTS:
        grid = np.linspace(start, end, _MAX_POINTS)
    losses = np.array([np.interp(grid, x, y) for x, y in series]).reshape(len(series), -1)
    return MeanCurve(x=grid.tolist(), intervals=[mean_interval(one) for one in losses.T.tolist()])


def _warnings(
    runs: Sequence[RunSummary],
    by: Sequence[str],
    members: Sequence[Sequence[RunSummary]],
    columns: Sequence[str],
) -> Iterator[str]:
    """Yield what limits the comparison and, if there are groups, their means."""
    if len(runs) == 1:
        yield f"{runs[0].name} is the only run: nothing to compare it with"
    texts: dict[str, list[str]] = {}
    for run in runs:
        if run.best is not None:
            texts.setdefault(run.held_out, []).append(run.name)
    if len(texts) > 1:
        parts = "; ".join(_listed(names) for names in texts.values())
        yield f"the held-out texts differ, so their losses cannot be compared: {parts}"
    for state, words in _NOTED.items():
        if names := [run.name for run in runs if run.state == state]:
            yield f"{words}: {_listed(names)}"
    if names := [run.name for run in runs if run.best is None]:
        yield f"without an evaluation on held-out text: {_listed(names)}"
    if names := [run.name for run in runs if run.changed_corpus]:
        yield f"the corpus was changed during the run, so its curve has two texts: {_listed(names)}"
    for one, other in combinations(runs, 2):
        if _is_repeated(one, other):
            yield f"{one.name} and {other.name} are the same run, not two results"
    if by and (names := [run.name for run in runs if run.state != "finished"]):
        yield f"not in the means, since they have not finished: {_listed(names)}"
    for name in columns:
        differs = any(len({_values(run, [name]) for run in group}) > 1 for group in members)
        if name not in _BY_CHANCE and differs:
            yield f"{name} differs within a group: its interval is not that of chance alone"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
