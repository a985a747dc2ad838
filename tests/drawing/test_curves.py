"""Curves over each other: in the terminal, as SVG and PNG, and the tables of a comparison."""

import io
import itertools
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from support.runs import simulate_run
from tgen.drawing.comparison import (
    TextTable,
    comparison_plot,
    comparison_rows,
    comparison_tables,
    latex,
    markdown,
)
from tgen.drawing.curve_files import COLORS, CurveLayout, png, svg
from tgen.drawing.curve_plot import Curve, CurvePlot, draw_curves
from tgen.drawing.page.comparison_page import comparison_page
from tgen.experiments.comparison import compare_runs

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = r"</title><b>&%$#_{}~^\|`*[x](y) – 日本"


def plot(n: int, *, band: bool = False, label: str = "run") -> CurvePlot:
    """Return n curves that halve their distance to 2 every 100 steps."""
    steps = list(range(50, 501, 50))
    curves = []
    for i in range(n):
        y = [2 + 0.01 * i + 3 * 0.5 ** (step / 100) for step in steps]
        ends = {"low": [v - 0.1 for v in y], "high": [v + 0.1 for v in y]} if band else {}
        curves.append(Curve(label=f"{label}-{i}", color=i // 3, x=steps, y=y, **ends))
    return CurvePlot(title="loss", x_name="step", y_name="bits/byte", curves=curves)


@pytest.mark.parametrize("n", [1, 2, 18, 70])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_every_curve_has_a_letter_at_its_end_and_in_the_legend(n, width):
    lines = [line.plain for line in draw_curves(plot(n), width=width)]
    assert max(map(len, lines)) <= max(50, width)
    figure, legend = "".join(lines[1:19]), "\n".join(lines[22:])
    for i, letter in enumerate(plot(n).names()):
        assert f"{letter or '·'} run-{i}" in legend
        if n <= 18:
            assert figure.count(letter) == 1


def test_any_number_can_be_drawn():
    far = Curve(
        label="a", color=0, x=[1, 500, 1000], y=[1e99, 2.0, 1.0], low=[-1e99] * 3, high=[1e99] * 3
    )
    lines = draw_curves(CurvePlot(title="", x_name="", y_name="", curves=[far]), width=80)
    assert "A" in "".join(line.plain for line in lines[:20])


def test_no_curve_is_an_empty_figure():
    assert draw_curves(plot(0), width=80) == []


def test_axes_show_the_ends_of_all_curves_but_not_the_start_and_wide_intervals():
    x, y = plot(3).axes(100, 100)
    assert (x.low, x.high) == (0, 500)
    assert y.high < 3.7 < plot(3).curves[0].y[0]
    wide = Curve(label="a", color=0, x=[1, 2], y=[2.0, 1.0], low=[-50, -50], high=[90, 90])
    _, y = CurvePlot(title="", x_name="", y_name="", curves=[wide]).axes(10, 10)
    assert (y.low, y.high) == pytest.approx((0.4, 2.6))


def test_svg_has_every_point_label_and_interval():
    root = ET.fromstring(svg(plot(18, band=True, label=HOSTILE)))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    groups = [one for one in root.iter(f"{SVG}g") if one.find(f"{SVG}title") is not None]
    assert len(groups) == 18
    for i, group in enumerate(groups):
        assert group.find(f"{SVG}title").text == f"{HOSTILE}-{i}"
        assert any(f"{HOSTILE[:20]}" in text and text.endswith(f"-{i}") for text in texts)
        line, band = group.find(f"{SVG}polyline"), group.find(f"{SVG}polygon")
        assert line.get("stroke") == COLORS[i // 3]
        assert len(line.get("points").split()) == 10
        assert len(band.get("points").split()) == 20


@pytest.mark.parametrize("n", [1, 5, 18, 60])
def test_labels_beside_the_curves_do_not_overlap(n):
    layout = CurveLayout(plot(n), lambda text, _: 7.0 * len(text))
    heights = sorted(box.y for box in layout.texts if "run-" in box.text)
    assert all(b - a >= 14.9 for a, b in itertools.pairwise(heights))
    assert heights[0] >= 50
    assert heights[-1] <= layout.height - 40


@pytest.mark.parametrize("crowd", [2.0, 3.0])
def test_labels_of_a_crowd_stay_inside_the_picture(crowd):
    ends = [5.0 - crowd, *(crowd + i / 1000 for i in range(20))]
    curves = [Curve(label="run-", color=0, x=[1, 2], y=[2.5, end]) for end in ends]
    crowded = CurvePlot(title="", x_name="", y_name="", curves=curves)
    layout = CurveLayout(crowded, lambda text, _: 7.0 * len(text))
    heights = sorted(box.y for box in layout.texts if "run-" in box.text)
    assert all(b - a >= 14.9 for a, b in itertools.pairwise(heights))
    assert heights[0] >= 50
    assert heights[-1] <= layout.height - 40


def test_png_has_the_colors_of_the_curves():
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(png(plot(9, band=True))))
    layout = CurveLayout(plot(9), lambda text, _: 7.0 * len(text))
    assert image.height == layout.height
    found = {tuple(color) for color in np.asarray(image).reshape(-1, 3).tolist()}
    for color in COLORS[:3]:
        assert tuple(bytes.fromhex(color[1:])) in found


@pytest.fixture
def report(finished_run, tmp_path):
    """Return a comparison of two families of two seeds, with hostile names."""
    for seed, family in itertools.product((1, 2), ("gpt2", "llama")):
        name = f"{HOSTILE.replace('/', '')}{family}{seed}"
        losses = [3.0, 2.0 + 0.1 * seed]
        simulate_run(tmp_path / name, finished_run / "model", losses, family=family, seed=seed)
    return compare_runs([tmp_path], by=["family"])


def test_markdown_and_latex_escape_all_text(report):
    lines = markdown(report).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert r"\<title\>\<b\>\&%\$\#\_{}\~^\\\|\`\*\[x\]" in markdown(report)
    unescaped = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows]
    assert set(unescaped[:4]) == {10}  # the groups: header, rule, two rows
    assert "2.150 ± 0.635" in markdown(report)
    tex = latex(report)
    assert r"2.150 $\pm$ 0.635" in tex
    assert r"\textless{}title\textgreater{}" in tex
    assert r"\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}\textbar{}" in tex
    assert "日" not in tex


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0"), (999, "999"), (38_400, "38.4k"), (999_499, "999k"), (999_600, "1M"), (2e12, "2T")],
)
def test_counts_have_three_digits_and_a_prefix(report, n, shown):
    groups = [replace(report.groups[0], tokens=n)]
    assert comparison_tables(replace(report, groups=groups))[0].rows[0][">tokens"] == shown


def test_wide_table_is_split_into_results_and_costs(report):
    (groups, *_) = comparison_tables(report)
    assert groups.fitting(200) == [groups]
    results, costs = groups.fitting(40)
    assert {*results.names} & {*costs.names} == {"family"}
    assert {*results.names} | {*costs.names} == {*groups.names}


def test_long_names_of_runs_break_after_a_setting():
    name = "sweeps/long/learning_rate=0.003_dropout=0.1_seed=0"
    runs = [{"run": name, ">best": "1.234"}, {"run": "short", ">best": "1.3"}, {"run": "x" * 60}]
    (cells,) = TextTable("runs", [{">best": ""} | run for run in runs], ["run"]).fitting(40)
    lines = [row["run"].split("\n") for row in cells.rows]
    assert lines[0] == ["sweeps/long/learning_rate=0.003_", "dropout=0.1_seed=0"]
    assert lines[1:] == [["short"], ["x" * 33, "x" * 27]]


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs LaTeX")
def test_latex_compiles(report, tmp_path):
    preamble = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    (tmp_path / "t.tex").write_text(preamble + latex(report) + "\\end{document}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]


def test_page_has_the_curves_over_each_scale_and_escaped_tables(report):
    page = comparison_page(report, "time")
    assert page.count("<svg xmlns") == 4
    assert "<b>" not in page
    assert "</title><b" not in page
    assert re.search(r'id="x3" checked', page)
    assert "<script" not in page


def test_csv_has_every_evaluation_or_the_means(report):
    header, *rows = comparison_rows(report, "step")
    assert header == ("family", "runs", "step", "mean", "low", "high")
    assert [tuple(row)[:4] for row in rows if "gpt2" in row] == [
        ("gpt2", 2, 100, 3.0),
        ("gpt2", 2, 200, pytest.approx(2.15)),
    ]
    header, *rows = comparison_rows(
        compare_runs([report.runs[0].path, report.runs[1].path]), "time"
    )
    assert header == ("run", "family", "step", "tokens", "seconds", "flop", "bits_per_byte")
    assert len(rows) == 4


def test_units_of_the_axes_fit_their_values(report):
    names = {scale: comparison_plot(report, scale).x_name for scale in ("step", "time", "flop")}
    assert names == {"step": "step", "time": "seconds", "flop": "MFLOP"}
