"""Runs compared: their settings, held-out losses and costs, alone and in groups."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from tgen.reports.score import Score, ScoreDifference

Scale = Literal["step", "token", "time", "flop"]  # horizontal axis of a curve
RunState = Literal["finished", "stopped", "unfinished", "diverged"]


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """The held-out loss of a run; one value per evaluation, and what was spent until then."""

    step: list[int]
    token: list[int]
    time: list[float]  # seconds
    flop: list[float]
    bits_per_byte: list[float]


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """The score of a run's model on a text, and the difference to the best model of all runs."""

    score: Score
    difference: ScoreDifference | None  # None: it is the best


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run by its record and its log."""

    name: str
    path: str
    run_id: str
    state: RunState
    settings: dict[str, Any]
    implied: list[str]  # settings of the model that follow from its family and shape
    held_out: str  # identifies the held-out text
    changed_corpus: bool  # by --override
    n_parameters: int
    steps: int
    tokens: int
    seconds: float
    flop: float  # of the matrix products and attention, forward and backward
    best: float | None  # bits per byte of the held-out text; None: never evaluated
    final: float | None  # the same, of the last evaluation
    curve: LossCurve
    text: TextScore | None = None

    @property
    def text_bits(self) -> float | None:
        """Bits per byte of the text that was scored."""
        return None if self.text is None else self.text.score.bits_per_byte


@dataclass(frozen=True, kw_only=True)
class MeanInterval:
    """The mean of several runs and its 95% confidence interval, infinite for one run."""

    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width

    @property
    def is_finite(self) -> bool:
        """Whether there were at least two runs."""
        return math.isfinite(self.half_width)


@dataclass(frozen=True, kw_only=True)
class MeanCurve:
    """The mean held-out loss of a group where all its runs have one."""

    x: list[float]
    intervals: list[MeanInterval]


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """The finished runs that have equal values of some settings."""

    values: dict[str, Any]  # by setting
    held_out: str
    runs: list[str]
    n_parameters: float  # means, as below
    steps: float
    tokens: float
    seconds: float
    flop: float
    best: MeanInterval | None  # None: never evaluated
    final: MeanInterval | None
    text: MeanInterval | None  # bits per byte of the text that was scored
    curves: dict[Scale, MeanCurve]


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Runs side by side: the best first, those of other held-out texts apart."""

    runs: list[RunSummary]
    differing: list[str]  # settings that are not the same in all runs
    columns: list[str]  # those that tell the runs apart
    configurations: list[int]  # equal for runs that differ in nothing but their seed, in order
    by: list[str]  # settings that make the groups
    groups: list[GroupSummary]
    warnings: list[str] = field(default_factory=list)
