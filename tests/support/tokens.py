"""Hostile tokens, random attention weights, and their terminal output."""

import io
from typing import Any

import numpy as np
from rich.console import Console

from tgen.reports.inspection import AttentionReport

HOSTILE = [
    b"[/x]",
    b"[red]",
    b":smile:",
    b"\x1b[31m",
    "\u202e".encode(),
    "\u2028".encode(),
    b"\xe6\x97",
    "日本".encode(),
    "\u0301".encode(),
    b"</script>",
    b"<img onerror=x>",
    b"\0",
    b"",
    b"\n",
    b" \t\r",
    b"[/x]",
    b":smile:",
]


def random_weights(n: int) -> np.ndarray[Any, Any]:
    """Return an (n, n) lower triangle whose rows sum to 1."""
    weights = np.tril(np.random.default_rng(0).random((n, n)).astype(np.float32) ** 4)
    return weights / weights.sum(axis=1, keepdims=True)


def attention_report(weights: np.ndarray[Any, Any]) -> AttentionReport:
    return AttentionReport(
        layer=1,
        head=2,
        kv_head=2,
        window=None,
        weights=weights,
        measure="attention",
    )


def printed(lines: Any, width: int = 80, **options: Any) -> str:
    """Return what a Rich console of this width prints."""
    out = io.StringIO()
    Console(width=width, file=out, **options).print(*lines, sep="\n")
    return out.getvalue()
