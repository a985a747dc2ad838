"""Conversion of reports, and of text that need not be UTF-8, to JSON values."""

import base64
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # `tgen generate` needs no report of a training run
    from tgen.reports.sweep import SweepPlanReport, SweepRunReport
    from tgen.reports.training import LoggedReport


def json_text(data: bytes, name: str = "text") -> dict[str, str]:
    """Return {name: text}, and {name_bytes: base64} too where the bytes are not valid UTF-8.

    For `text` that second key is `bytes`.
    """
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        bytes_name = "bytes" if name == "text" else f"{name}_bytes"
        encoded = base64.b64encode(data).decode()
        return {name: data.decode(errors="replace"), bytes_name: encoded}


def json_record(report: "LoggedReport | SweepPlanReport | SweepRunReport") -> dict[str, Any]:
    """Return a report of a run or a sweep as {"kind": class name, **fields}."""
    values: dict[str, Any] = json_value(report)
    return {"kind": type(report).__name__} | values


def json_value(report: Any) -> Any:
    """Return a report as JSON values: dataclasses and named tuples become objects,
    arrays become lists.

    Rows of a field with the metadata `causal` end at the diagonal. NaN and infinities become null.
    """
    if is_dataclass(report):
        record: dict[str, Any] = {}
        for field in fields(report):
            value = getattr(report, field.name)
            if isinstance(value, bytes):
                record |= json_text(value, field.name)
            elif "causal" in field.metadata:
                rows = value.tolist() if np.isfinite(value).all() else json_value(value)
                record[field.name] = [row[: i + 1] for i, row in enumerate(rows)]
            else:
                record[field.name] = json_value(value)
        return record
    if isinstance(report, np.ndarray):
        return json_value(report.tolist())
    if isinstance(report, dict):
        return {name: json_value(value) for name, value in report.items()}
    if isinstance(report, tuple) and hasattr(report, "_asdict"):
        return json_value(report._asdict())
    if isinstance(report, list | tuple):
        return [json_value(value) for value in report]
    if isinstance(report, bytes):
        return report.decode(errors="replace")
    if isinstance(report, float) and not np.isfinite(report):
        return None
    return report
