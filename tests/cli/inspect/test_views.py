"""Heat maps and tables in a terminal: they say what the reports say, whatever the tokens are."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from support.pages import heads_of
from tgen.cli.inspect.csv import csv_rows, csv_text
from tgen.cli.inspect.heatmap.builders import attention_map
from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.terminal import draw_cells
from tgen.cli.inspect.tables.heads import compare_view, heads_view
from tgen.cli.inspect.tables.predictions import lens_view, prediction_table, why_view
from tgen.cli.inspect.tables.tokens import token_table
from tgen.cli.render.colormap import color_at, is_light
from tgen.cli.render.token_labels import label
from tgen.reports import (
    AttentionReport,
    Contribution,
    LensReport,
    Prediction,
    TextReport,
    TokenReport,
    WhyReport,
    json_value,
)

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
N = len(HOSTILE)


def triangle(n, seed=0):
    weights = np.tril(np.random.default_rng(seed).random((n, n)).astype(np.float32) ** 4)
    return weights / weights.sum(axis=1, keepdims=True)


def report_of(weights, **values):
    usual = {"layer": 1, "head": 2, "kv_head": 2, "measure": "attention", "why": ""}
    return AttentionReport(weights=weights, **usual | values)


def printed(things, width=80, **options):
    console = Console(width=width, file=io.StringIO(), **options)
    console.print(*things, sep="\n")
    return console.file.getvalue()


def test_every_token_has_a_printable_label():
    for token in HOSTILE:
        shown = label(token)
        assert shown
        assert shown.isprintable()
    assert label(b" the\n") == "·the⏎"
    assert label(b"\xe6\x97") == "‹E6 97›"
    assert label("日本語".encode(), width=5) == "日本…"
    assert label("e\u0301".encode()) == "e\u0301"
    assert label("\u0301e".encode()) == "◌\u0301e"


def test_white_and_black_can_be_read_on_every_colour():
    def luminance(of):
        parts = [c / 255 for c in of]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for i in range(101):
        back = luminance(color_at(i / 100))
        contrast = (back + 0.05) / 0.05 if is_light(color_at(i / 100)) else 1.05 / (back + 0.05)
        assert contrast >= 4.5


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("cells", ["num", "block", "list"])
def test_hostile_tokens_survive_every_cell_at_every_width(width, cells):
    heat = attention_map(report_of(triangle(N)), HOSTILE, scale="sqrt")
    things = draw_cells(heat, cells=cells, width=width, is_terminal=False)
    text = printed(things, width=width)
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


def test_views_of_tokens_survive_hostile_ones():
    tokens = [
        TokenReport(
            index=i, id=i, text=token, start=0, surprisal=1.5, rank=2, likeliest=1,
            likeliest_text=token, likeliest_probability=0.5,
        )
        for i, token in enumerate(HOSTILE)
    ]  # fmt: skip
    text = TextReport(
        tokens=tokens, n_bytes=9, nats_per_token=1.0, perplexity=2.7, bits_per_byte=None
    )
    candidates = [Prediction(id=i, text=t, probability=0.1, logit=1) for i, t in enumerate(HOSTILE)]
    lens = LensReport(
        layers=["embedding"],
        first=0,
        likeliest=[list(range(N))],
        likeliest_text=[HOSTILE],
        probabilities=np.full((1, N), 0.5, np.float32),
        query=0,
        candidates=[candidates],
        answer=0,
        answer_text=HOSTILE[0],
        ranks=[0],
        answer_probabilities=[0.5],
    )
    for token in HOSTILE:
        parts = [Contribution(part="layer 0, head 1", layer=0, head=1, logit=1.0)]
        why = WhyReport(
            query=0,
            target=1,
            target_text=token,
            probability=0.5,
            logit=1.0,
            parts=parts,
            difference=0.0,
        )
        views = [
            *token_table(text, rows=range(N), width=160, coloured=False),
            prediction_table(candidates, after=label(token), width=160),
            *lens_view(lens, HOSTILE, width=160),
            *why_view(why, token, top=3, width=160),
        ]
        shown = printed(views, width=160)
        assert not {"\x1b", "\u202e", "\u2028", "\0"} & set(shown)
        assert label(token, width=10) in shown
    record = json.loads(json.dumps(json_value(text), allow_nan=False))
    rows = list(csv.reader(io.StringIO(csv_text(csv_rows(text, range(N), HOSTILE)))))
    for i, token in enumerate(HOSTILE):
        assert rows[i + 1][2] == label(token)
        if i != 6:
            assert record["tokens"][i]["text"].encode() == token
    assert record["tokens"][6]["bytes"] == "5pc="


def test_digits_are_percent_and_what_is_cut_is_said():
    weights = triangle(60)
    tokens = [f"t{i}".encode() for i in range(60)]
    heat = attention_map(report_of(weights), tokens, scale="sqrt")
    text = printed(draw_cells(heat, cells="num", width=80, is_terminal=False))
    lines = text.splitlines()
    last = next(line for line in lines if line.startswith("  59 "))
    shown = [last[14 + 3 * i : 17 + 3 * i].strip() for i in range(22)]
    assert shown == [f"{w * 100:.0f}" if w >= 0.005 else "·" for w in weights[59, 38:]]
    held = weights[38:, 38:].sum() / 22  # the rows above have nothing there
    flat = " ".join(text.split())
    assert f"keys 38 to 59 of 60 hold {held:.0%} of these rows' weight" in flat
    assert "queries 38 to 59 of 60" in flat


def test_hidden_keys_are_said_and_nothing_is_scaled_up():
    weights = triangle(5)
    heat = attention_map(report_of(weights), [b"a", b"b", b"c", b"d", b"e"], scale="sqrt")
    things = draw_cells(heat, cells="num", width=80, is_terminal=False, columns=range(1, 5))
    text = printed(things)
    held = weights[:, 0].sum() / 5
    said = (
        f"the first key is left out: it holds {held:.0%}, the others {1 - held:.0%} of these rows"
    )
    assert said in " ".join(text.split())
    row = next(line for line in text.splitlines() if line.startswith("   4 "))
    assert row.split()[2:] == [f"{w * 100:.0f}" if w >= 0.005 else "·" for w in weights[4, 1:]]


def test_a_list_leaves_nothing_out():
    weights = triangle(12)
    heat = attention_map(report_of(weights), [b"x"] * 12, scale="sqrt")
    lines = printed(
        draw_cells(heat, cells="list", width=200, is_terminal=False), width=200
    ).splitlines()
    for i, line in enumerate(lines[1:13]):
        numbers = [float(part) for part in line.split() if "." in part]
        assert sum(numbers) == pytest.approx(1, abs=0.03), line
        assert ("rest" in line) == (i >= 4)


def test_blocks_show_every_cell_and_pooled_ones_their_largest():
    weights = triangle(20)
    heat = attention_map(report_of(weights), [b"x"] * 20, scale="linear")
    options = {"cells": "block", "is_terminal": True}
    marks = printed(draw_cells(heat, width=80, **options)).splitlines()[2:22]
    for i, line in enumerate(marks):
        cells = line[14:].ljust(20)
        assert cells[i + 1 :].strip() == ""
        for j in range(i + 1):
            level = round(float(weights[i, j]) * 63) * 10 // 64
            assert cells[j] == " ·:-=+*#%@"[level]
    # In colour two rows a line: foreground above, background below.
    text = printed(
        draw_cells(heat, width=80, **options), force_terminal=True, color_system="truecolor"
    ).splitlines()
    assert len(text) == 1 + 1 + 10 + 1
    red, green, blue = color_at(round(float(weights[18, 0]) * 63) / 63)
    assert f"38;2;{red};{green};{blue}" in text[11]
    pooled = printed(draw_cells(heat, width=14 + 7, **options), width=200)
    assert "each cell is the largest of 3 x 3" in pooled
    first = pooled.splitlines()[2][14:]
    level = round(float(weights[:3, :3].max()) * 63) * 10 // 64
    assert first[0] == " ·:-=+*#%@"[level]
    assert len(first.rstrip()) == 1


def test_positions_are_drawn_with_their_sign():
    values = np.array([[-1, 0, 1], [1, 0, -1]], np.float32)
    heat = HeatMap(
        title="x", values=values, rows=["0", "1"], columns=["0", "1", "2"], low=-1, high=1,
        scale="linear", causal=False, percent=False,
    )  # fmt: skip
    lines = printed(draw_cells(heat, cells="auto", width=80, is_terminal=False)).splitlines()
    assert lines[2][14:] == "    " + "++++" + "@@@@"
    assert lines[3][14:] == "@@@@" + "++++"


def test_every_weight_comes_back_from_csv_exactly():
    weights = triangle(30)
    text = csv_text(csv_rows([report_of(weights)], range(30), [b"x"] * 30))
    for row in csv.DictReader(io.StringIO(text)):
        assert np.float32(row["weight"]) == weights[int(row["query"]), int(row["key"])]


def test_marks_are_named_with_their_ends_and_the_logarithm_with_its_floor():
    heat = attention_map(report_of(triangle(9)), [b"x"] * 9, scale="log")
    options = {"cells": "block", "width": 80, "is_terminal": True}
    plain = printed(draw_cells(heat, **options))
    assert "‘ ·:-=+*#%@’ from 0% to 100%, by its logarithm from 0.01% on" in plain
    assert "dark is 0%, light 100%" in printed(draw_cells(heat, coloured=True, **options))


def test_rows_that_would_be_empty_are_left_out_and_one_thing_is_one():
    heat = attention_map(report_of(triangle(30)), [b"x"] * 30, scale="sqrt")
    options = {"cells": "num", "width": 40, "is_terminal": True}
    text = " ".join(printed(draw_cells(heat, **options)).split())
    assert "queries 22 to 29 of 30" in text
    text = " ".join(
        printed(draw_cells(heat, rows=range(4, 5), columns=range(2, 3), **options)).split()
    )
    assert "query 4 of 30" in text
    assert "key 2 of 30 holds" in text


def test_heads_leave_out_what_does_not_fit_and_say_so():
    report = replace(heads_of(2, 3), loss=3.0)
    report = replace(report, heads=[replace(head, ablation=-0.0) for head in report.heads])
    for width in (None, 120, 80, 60, 40):
        lines = printed(heads_view(report, width=width), width=width or 200).splitlines()
        assert max(map(cell_len, lines)) <= (width or 200)
        names = lines[0].split()
        text = " ".join(" ".join(lines).split())
        left = text.partition("not shown at this width: ")[2].partition(";")[0].split(", ")
        wanted = "head role cost keys back self prev first dup induction text"
        assert names + [name for name in left if name] == [*wanted.split(), "near>far"]
        assert (left == [""]) == (width in (None, 120))
        assert "drawn from all 300" in text or "dup" in left
        assert "-0.0" not in text
    moved = [0.1] * 5 + [0.4]
    for width in (80, 50):
        lines = printed(compare_view(report, report, moved, width=width), width=width).splitlines()
        assert max(map(cell_len, lines)) <= width
        assert "1.2 (40%)" in " ".join(lines)
