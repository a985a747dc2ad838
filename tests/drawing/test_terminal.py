"""Heat maps in the terminal: they show the report's values, whatever the tokens are."""

from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len

from support.tokens import HOSTILE, attention_report, printed, random_weights
from tgen.drawing.colormap import color_at
from tgen.drawing.heat_map import HeatMap, attention_map, patch_map
from tgen.drawing.heat_map_terminal import draw_heat_map
from tgen.drawing.terminal_text import label
from tgen.reports.inspection import PatchReport


def heat_map(n: int, *, scale="sqrt", tokens=None) -> tuple[np.ndarray, HeatMap]:
    """Return random weights and their heat map."""
    weights = random_weights(n)
    return weights, attention_map(attention_report(weights), tokens or [b"x"] * n, scale=scale)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("cells", ["num", "block", "list"])
def test_hostile_tokens_are_shown_as_labels_at_every_width(width, cells):
    _, heat = heat_map(len(HOSTILE), tokens=HOSTILE)
    lines = draw_heat_map(heat, cells=cells, width=width, is_terminal=False)
    text = printed(lines, width=width)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\u2028" not in text
    labels = [label(token) for token in HOSTILE]
    if cells == "list":
        flat = "".join(text.split("\n"))
        assert all(f"{i} {name} -> " in flat for i, name in enumerate(labels))
    else:
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert "[/x]" in text
        assert ":smile" in text  # not an emoji


def test_numbers_are_percent_and_notes_name_hidden_rows_and_columns():
    weights, heat = heat_map(60, tokens=[f"t{i}".encode() for i in range(60)])
    text = printed(draw_heat_map(heat, cells="num", width=80, is_terminal=False))
    lines = text.splitlines()
    last = next(line for line in lines if line.startswith("  59 "))
    shown = [last[14 + 3 * i : 17 + 3 * i].strip() for i in range(22)]
    assert shown == [f"{w * 100:.0f}" if w >= 0.005 else "·" for w in weights[59, 38:]]
    share = weights[38:, 38:].sum() / 22  # earlier rows have no weight there
    flat = " ".join(text.split())
    assert f"keys 38 to 59 of 60 have {share:.0%} of these rows' total" in flat
    assert "queries 38 to 59 of 60" in flat


def test_patched_shares_keep_sign_and_space_and_name_both_tokens():
    scores = np.array([[1, 1, 1, -0.1], [12.5, 0.001, -0.004, -3]], np.float32)
    report = PatchReport(
        part="residual",
        scores=scores,
        target=0,
        target_text=b" king",
        contrast=1,
        contrast_text=b"[red]",
        difference=2.0,
        other_difference=-1.0,
        other_ids=[0, 1, 2, 3],
        other_tokens=[b"a", b"b", b"c", b"e"],
    )
    heat = patch_map(report, [b"a", b"b", b"c", b"d"])
    for width in (40, 80):
        lines = draw_heat_map(heat, cells="num", width=width, is_terminal=False)
        shown = [line.split() for line in printed(lines, width=width).splitlines()]
        assert ["layer", "a", "b", "c", "d|e"] in shown
        assert ["0", "100", "100", "100", "-10"] in shown
        assert ["1", "1250", "·", "·", "-300"] in shown
    narrow = printed(draw_heat_map(heat, cells="num", width=26, is_terminal=False), width=26)
    assert "positions 2 to 3 of 4; --keys" in " ".join(narrow.split())  # no share of a total
    heads = patch_map(replace(report, part="heads"), [b"a"])
    text = printed(draw_heat_map(heads, cells="num", width=80, is_terminal=False))
    assert sum(line.split()[-4:] == ["0", "1", "2", "3"] for line in text.splitlines()) == 1
    assert (heat.low, heat.high) == (-3, 12.5)


def test_hidden_first_key_is_noted_and_others_are_not_rescaled():
    weights, heat = heat_map(5, tokens=[b"a", b"b", b"c", b"d", b"e"])
    lines = draw_heat_map(heat, cells="num", width=80, is_terminal=False, columns=range(1, 5))
    text = printed(lines)
    share = weights[:, 0].sum() / 5
    note = f"the first key is hidden: it has {share:.0%}, the others {1 - share:.0%} of these rows"
    assert note in " ".join(text.split())
    row = next(line for line in text.splitlines() if line.startswith("   4 "))
    assert row.split()[2:] == [f"{w * 100:.0f}" if w >= 0.005 else "·" for w in weights[4, 1:]]


def test_shares_of_a_list_sum_to_1():
    _, heat = heat_map(12)
    lines = printed(
        draw_heat_map(heat, cells="list", width=200, is_terminal=False), width=200
    ).splitlines()
    for i, line in enumerate(lines[1:13]):
        numbers = [float(part) for part in line.split() if "." in part]
        assert sum(numbers) == pytest.approx(1, abs=0.03), line
        assert ("rest" in line) == (i >= 4)


@pytest.mark.parametrize("cells", ["num", "block", "list"])
def test_cells_before_a_sliding_window_are_empty(cells):
    weights = np.tril(np.triu(np.full((12, 12), 0.25, np.float32), -3))
    report = replace(attention_report(weights), window=4)
    heat = attention_map(report, [b"x"] * 12, scale="sqrt")
    assert heat.title.endswith("sliding window of 4 tokens")
    lines = printed(draw_heat_map(heat, cells=cells, width=120, is_terminal=False)).splitlines()
    if cells == "list":
        assert [line.count(".25") for line in lines[1:13]] == [1, 2, 3, *(9 * [4])]
        assert not any("rest" in line for line in lines[1:13])
    else:
        first = next(i for i, line in enumerate(lines) if line.startswith("   0 x"))
        widths = [len(line) - len(line[14:].lstrip()) - 14 for line in lines[first : first + 12]]
        cell = 1 if cells == "block" else 3
        assert [width // cell for width in widths] == [0, 0, 0, 0, *range(1, 9)]


def test_blocks_show_every_cell_or_the_maximum_of_pooled_cells():
    weights, heat = heat_map(20, scale="linear")
    options = {"cells": "block", "is_terminal": True}
    lines = printed(draw_heat_map(heat, width=80, **options)).splitlines()[2:22]
    for i, line in enumerate(lines):
        cells = line[14:].ljust(20)
        assert cells[i + 1 :].strip() == ""
        for j in range(i + 1):
            level = round(float(weights[i, j]) * 63) * 10 // 64
            assert cells[j] == " ·:-=+*#%@"[level]
    # In color, a line has two rows: foreground above, background below.
    text = printed(
        draw_heat_map(heat, width=80, **options), force_terminal=True, color_system="truecolor"
    ).splitlines()
    assert len(text) == 1 + 1 + 10 + 1
    red, green, blue = color_at(round(float(weights[18, 0]) * 63) / 63)
    assert f"38;2;{red};{green};{blue}" in text[11]
    pooled = printed(draw_heat_map(heat, width=14 + 7, **options), width=200)
    assert "each cell: maximum of 3 x 3" in pooled
    first = pooled.splitlines()[2][14:]
    level = round(float(weights[:3, :3].max()) * 63) * 10 // 64
    assert first[0] == " ·:-=+*#%@"[level]
    assert len(first.rstrip()) == 1


def test_signed_values_span_the_whole_range_of_shades():
    values = np.array([[-1, 0, 1], [1, 0, -1]], np.float32)
    heat = HeatMap(
        title="x", values=values, rows=["0", "1"], columns=["0", "1", "2"], low=-1, high=1,
        scale="linear", causal=False, percent=False,
    )  # fmt: skip
    lines = printed(draw_heat_map(heat, cells="auto", width=80, is_terminal=False)).splitlines()
    assert lines[2][14:] == "    " + "++++" + "@@@@"
    assert lines[3][14:] == "@@@@" + "++++"


def test_legend_names_the_ends_and_the_scale():
    _, heat = heat_map(9, scale="log")
    options = {"cells": "block", "width": 80, "is_terminal": True}
    plain = printed(draw_heat_map(heat, **options))
    assert "‘ ·:-=+*#%@’ from 0% to 100%, log scale from 0.01%" in plain
    assert "dark is 0%, light is 100%" in printed(draw_heat_map(heat, has_color=True, **options))


def test_empty_rows_are_omitted_and_notes_use_the_singular_for_one():
    _, heat = heat_map(30)
    options = {"cells": "num", "width": 40, "is_terminal": True}
    text = " ".join(printed(draw_heat_map(heat, **options)).split())
    assert "queries 22 to 29 of 30" in text
    one = draw_heat_map(heat, rows=range(4, 5), columns=range(2, 3), **options)
    text = " ".join(printed(one).split())
    assert "query 4 of 30" in text
    assert "key 2 of 30 has" in text
