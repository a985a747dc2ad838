"""Reports of a sweep: its plan, and the state of its runs."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """The plan of a combination of values; it is the same for every seed."""

    values: dict[str, str]  # those that differ between combinations, by name
    family: str
    size: str | None  # None: it follows from other options
    n_parameters: int
    minutes: float | None  # of a run; None: `steps` is set
    steps: int | None
    seconds: float  # expected, of a run
    settings: dict[str, Any]  # of TrainConfig, that the plan would choose anew for every run


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A part of successive halving; without halving, the only one has all combinations."""

    n_cells: int
    share: float  # of the time or the steps that the runs have had at its end


@dataclass(frozen=True, kw_only=True)
class SweepPlanReport:
    """The plan of a sweep."""

    out: str
    cells: list[CellPlan]
    seeds: list[int]
    rungs: list[Rung]
    n_done: list[int]  # by cell, runs that have ended for the current rung or with an earlier one
    seconds: float  # expected, of all runs one after the other
    disk_bytes: int  # expected, of all runs


@dataclass(frozen=True, kw_only=True)
class SweepRunReport:
    """A run of a sweep starts or continues, or has ended for this rung."""

    name: str  # of its directory
    cell: int  # index into the cells of the plan
    seed: int
    rung: int
    state: Literal["training", "done", "failed"]
    bits_per_byte: float | None = None  # of the held-out text, if done; None: nothing is held out
    reason: str = ""  # of a failure
    n_left: int = 0  # runs of this rung that have not ended
    seconds_left: float = 0.0  # expected until the end of the sweep
