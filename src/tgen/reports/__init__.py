"""Every record that the core hands out: frozen, plain numbers, units in the names.

The terminal is one reader of these, `--json` another, tests a third.
"""

from tgen.reports.as_json import json_record, json_text, json_value
from tgen.reports.generation import Finish, Removed, Token
from tgen.reports.inspection import (
    AttentionReport,
    Check,
    Contribution,
    HeadReport,
    HeadsReport,
    LensReport,
    Matrix,
    ModelSummary,
    PositionsReport,
    Prediction,
    RolloutReport,
    TextReport,
    TokenReport,
    WhyReport,
)
from tgen.reports.measuring import LengthReport, PrecisionReport, Timing, TrialReport, Verdict
from tgen.reports.training import (
    BackReport,
    Choice,
    DoneReport,
    EvalReport,
    MemorisationReport,
    PlanReport,
    RunReport,
    SampleReport,
    StepReport,
    TrainingCurves,
)

__all__ = [
    "AttentionReport",
    "BackReport",
    "Check",
    "Choice",
    "Contribution",
    "DoneReport",
    "EvalReport",
    "Finish",
    "HeadReport",
    "HeadsReport",
    "LengthReport",
    "LensReport",
    "Matrix",
    "MemorisationReport",
    "ModelSummary",
    "PlanReport",
    "PositionsReport",
    "PrecisionReport",
    "Prediction",
    "Removed",
    "RolloutReport",
    "RunReport",
    "SampleReport",
    "StepReport",
    "TextReport",
    "Timing",
    "Token",
    "TokenReport",
    "TrainingCurves",
    "TrialReport",
    "Verdict",
    "WhyReport",
    "json_record",
    "json_text",
    "json_value",
]
