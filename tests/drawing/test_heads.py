"""The table of head metrics fits its width and names what it drops."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from support.pages import sample_heads
from support.tokens import printed
from tgen.drawing.head_tables import comparison_table, heads_table

NAMES = [
    "head",
    "role",
    "Δloss",
    "keys",
    "dist",
    "self",
    "prev",
    "first",
    "duplicate",
    "induction",
    "text",
    "distances",
]


@pytest.mark.parametrize("width", [None, 120, 80, 60, 40])
def test_columns_that_do_not_fit_are_named(width):
    report = replace(sample_heads(2, 3), loss=3.0)
    report = replace(report, heads=[replace(head, ablation_cost=-0.0) for head in report.heads])
    lines = printed(heads_table(report, width=width), width=width or 200).splitlines()
    assert max(map(cell_len, lines)) <= (width or 200)
    names = lines[0].split()
    text = " ".join(" ".join(lines).split())
    dropped = text.partition("not shown at this width: ")[2].partition(";")[0].split(", ")
    assert names + [name for name in dropped if name] == NAMES
    assert (dropped == [""]) == (width in (None, 120))
    assert "sampled from all 300" in text or "duplicate" in dropped
    assert "-0.0" not in text


@pytest.mark.parametrize("width", [80, 50])
def test_comparison_lists_the_largest_shifts(width):
    report = replace(sample_heads(2, 3), loss=3.0)
    report = replace(report, heads=[replace(head, ablation_cost=-0.0) for head in report.heads])
    shifts = [0.1] * 5 + [0.4]
    lines = printed(comparison_table(report, report, shifts, width=width), width=width)
    assert max(map(cell_len, lines.splitlines())) <= width
    assert "1.2 (40%)" in " ".join(lines.splitlines())
