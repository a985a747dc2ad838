"""Reports and text for JSON."""

import base64
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np

from tgen.reports.inspection import AttentionReport, RolloutReport
from tgen.reports.training import RunReport


def json_record(report: RunReport) -> dict[str, Any]:
    """A report for JSON: {"kind": its name, **its fields}."""
    record = {"kind": type(report).__name__} | asdict(report)
    for name, value in list(record.items()):
        if isinstance(value, bytes):
            record |= json_text(value, name)
    return record


def json_text(data: bytes, name: str = "text") -> dict[str, str]:
    """Text for JSON: under `name`, and in base64 beside it where it is not valid UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        coded = base64.b64encode(data).decode()
        beside = "bytes" if name == "text" else f"{name}_bytes"
        return {name: data.decode(errors="replace"), beside: coded}


def json_value(report: Any) -> Any:
    """What was seen inside a model, for JSON: dataclasses as objects, arrays as lists; of attention
    the rows up to the diagonal. Numbers that are not finite become null."""
    if is_dataclass(report):
        record: dict[str, Any] = {}
        for field in fields(report):
            value = getattr(report, field.name)
            if isinstance(value, bytes):
                record |= json_text(value, field.name)
            elif field.name == "weights" and isinstance(report, AttentionReport | RolloutReport):
                record["weights"] = [row[: i + 1] for i, row in enumerate(value.tolist())]
            else:
                record[field.name] = json_value(value)
        return record
    if isinstance(report, np.ndarray):
        return json_value(report.tolist())
    if isinstance(report, dict):
        return {name: json_value(value) for name, value in report.items()}
    if isinstance(report, list | tuple):
        return [json_value(value) for value in report]
    if isinstance(report, bytes):
        return report.decode(errors="replace")
    if isinstance(report, float) and not np.isfinite(report):
        return None
    return report
