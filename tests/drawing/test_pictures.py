"""SVG, PNG and Vega-Lite show every value and every label."""

import base64
import io
import json
import re
import sys
import time
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from tgen.drawing import Scale
from tgen.drawing.colormap import color_at, to_hex
from tgen.drawing.heat_map import HeatMap, cell_colors
from tgen.drawing.heat_map_files import png, svg, vega
from tgen.drawing.picture_layout import Layout
from tgen.drawing.picture_text import TextBox
from tgen.errors import UsageError

HOSTILE = [
    "[/x]",
    "[red]",
    "</script>",
    "</title><b>",
    "<img onerror=alert(1)>",
    "\"'`&amp;&",
    ":smile:",
    "]]>",
    "日本",
    "‹U+202E›",
]
SHAPES = [(1, 1), (5, 5), (24, 24), (48, 48), (100, 100), (256, 256), (128, 64), (12, 300)]
SVG = "{http://www.w3.org/2000/svg}"


def attention(
    n: int,
    *,
    labels: list[str] | None = None,
    scale: Scale = "sqrt",
    window: int | None = None,
) -> HeatMap:
    """Return random weights whose rows sum to 1, some of them tiny."""
    scores = np.tril(np.random.default_rng(n).normal(size=(n, n)).astype(np.float32) * 3)
    weights = np.tril(np.exp(scores))
    names = [(labels or HOSTILE)[i % len(labels or HOSTILE)] for i in range(n)]
    return HeatMap(
        title="Layer 2 & head <3>",
        values=(weights / weights.sum(1, keepdims=True)).astype(np.float32),
        rows=names,
        columns=names,
        scale=scale,
        window=window,
        unit="percent of all",
    )


def positions(n_rows: int, n_columns: int) -> HeatMap:
    """Return noise from -1 to 1 whose labels are the indices."""
    noise = np.random.default_rng(n_rows).uniform(-1, 1, (n_rows, n_columns))
    return HeatMap(
        title="Positions",
        values=noise.astype(np.float32),
        rows=[str(i) for i in range(n_rows)],
        columns=[str(i) for i in range(n_columns)],
        row_name="position",
        column_name="dimension",
        low=-1,
        high=1,
        scale="linear",
        causal=False,
        percent=False,
        unit="",
    )


def visible_colors(heat: HeatMap) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return the color of each visible cell."""
    shades = heat.shades()
    n_rows, n_columns = shades.shape
    return {
        (i, j): color_at(float(shades[i, j]))
        for i in range(n_rows)
        for j in range(n_columns)
        if not heat.causal or i - (heat.window or n_rows) < j <= i
    }


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + "text")]


def shapes(root: ET.Element) -> list[ET.Element]:
    return [rect for rect in root.iter(SVG + "rect") if rect.find(SVG + "title") is not None]


def picture(data: bytes) -> NDArray[np.uint8]:
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(data))
    return np.asarray(image.convert("RGBA"))


def png_layout(heat: HeatMap) -> Layout:
    """Return the layout of the PNG."""
    font = pytest.importorskip("PIL.ImageFont").load_default
    return Layout(heat, lambda text, size: font(size).getlength(text))


@pytest.mark.parametrize(
    "heat", [attention(40), attention(30, scale="log"), attention(30, window=7), positions(9, 17)]
)
def test_vega_has_exact_values(heat: HeatMap):
    heat.values[-1, :4] = [0, 1e-45, 1.1754944e-38, 1 / 3]
    cells = json.loads(json.dumps(vega(heat), allow_nan=False))["datasets"]["cells"]
    by_index = {(cell["row"], cell["column"]): cell for cell in cells}
    assert by_index.keys() == visible_colors(heat).keys()
    assert len(cells) == len(by_index)
    for (i, j), cell in by_index.items():
        assert np.float32(cell["value"]) == heat.values[i, j]
        assert (cell["row_label"], cell["column_label"]) == (heat.rows[i], heat.columns[j])


@pytest.mark.parametrize("heat", [attention(9), attention(9, scale="log"), positions(75, 70)])
def test_vega_opens_in_altair(heat: HeatMap):
    altair = pytest.importorskip("altair")
    spec = json.loads(json.dumps(vega(heat)))
    opened = json.loads(altair.Chart.from_dict(spec).to_json())  # validated twice
    assert opened["encoding"]["color"]["scale"]["type"] == heat.scale
    assert opened["datasets"]["cells"] == spec["datasets"]["cells"]


def test_vega_labels_are_data_and_not_expressions():
    spec = vega(attention(12))
    names = {param["name"]: param["value"] for param in spec["params"]}
    assert names["row_names"] == [f"{i} {HOSTILE[i % 10]}" for i in range(12)]
    expressions = re.findall(r'"labelExpr": "([^"]*)"', json.dumps(spec))
    assert expressions == ["column_names[datum.value]", "row_names[datum.value]"]
    scale = spec["encoding"]["color"]["scale"]
    assert (scale["domain"], scale["range"][0], len(scale["range"])) == ([0, 1], "#440154", 8)
    assert vega(positions(3, 3))["params"][0]["value"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "heat", [attention(1), attention(20, window=3), attention(48), positions(12, 48)]
)
def test_svg_cells_are_shapes_with_their_values(heat: HeatMap):
    root = ET.fromstring(svg(heat))
    fills = {}
    for rect in shapes(root):
        row, column, value = (rect.findtext(SVG + "title") or "").split("\n")
        i, j = int(row.split()[1]), int(column.split()[1])
        fills[i, j] = rect.get("fill")
        number = 100 * float(heat.values[i, j]) if heat.percent else float(heat.values[i, j])
        assert float(value.removesuffix("%")) == pytest.approx(number, rel=6e-3, abs=1e-30)
        label = "" if heat.rows[i] == str(i) else f" {heat.rows[i]}"
        assert row == f"{heat.row_name} {i}{label}"
    assert fills == {cell: to_hex(color) for cell, color in visible_colors(heat).items()}
    assert root.find(SVG + "image") is None


@pytest.mark.parametrize("heat", [attention(49), attention(100, scale="log"), positions(128, 64)])
def test_svg_of_a_large_matrix_is_one_image(heat: HeatMap):
    root = ET.fromstring(svg(heat))
    (image,) = root.iter(SVG + "image")
    kind, data = image.get("href", "").split(",")
    assert kind == "data:image/png;base64"
    assert not shapes(root)
    pixels = picture(base64.b64decode(data, validate=True))
    assert pixels.shape == (*heat.values.shape, 4)
    colors = visible_colors(heat)
    for i, j in np.ndindex(heat.values.shape):
        expected = (*colors[i, j], 255) if (i, j) in colors else (255, 255, 255, 0)
        assert tuple(pixels[i, j].tolist()) == expected


@pytest.mark.parametrize("n", [10, 60])
def test_svg_is_self_contained_and_escapes_labels(n: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # SVG works without Pillow
    text = svg(attention(n))
    root = ET.fromstring(text)
    assert re.findall(r"https?:[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"url\([^)]*\)|@import|xlink|<script|<b>|<img", text) == ["url(#ramp)"]
    labels = HOSTILE if n == 10 else HOSTILE[::2]
    assert all(texts(root).count(label) >= 2 for label in labels)
    assert root.findtext(SVG + "title") == "Layer 2 & head <3>"
    assert {"Layer 2 & head <3>", "query", "key", "percent of all, square-root scale"} <= {
        *texts(root)
    }


def test_long_labels_are_cut_on_the_axes_and_complete_in_tooltips():
    long = "日" * 8 + "x" * 30
    root = ET.fromstring(svg(attention(2, labels=[long])))
    assert texts(root).count("日" * 8 + "x" * 7 + "…") == 4
    assert shapes(root)[0].findtext(SVG + "title") == f"query 0 {long}\nkey 0 {long}\n100%"


def test_cells_show_their_numbers_where_they_fit():
    heat = attention(4)
    heat.values[3] = [0.004, 0.994, 0.996, 0.47]
    numbers = texts(ET.fromstring(svg(heat)))[-10:]
    assert numbers[-4:] == ["·", "99", "100", "47"]
    heat = positions(3, 3)
    heat.values[2] = [-0.001, -1, 0.256]
    assert texts(ET.fromstring(svg(heat)))[-3:] == ["0.00", "-1.00", "0.26"]
    heat.values[2, 0] = 12345.6
    assert "0.26" not in texts(ET.fromstring(svg(heat)))


def test_legend_names_the_scale_and_its_ends():
    for heat, name, ends in (
        (attention(3), "percent of all, square-root scale", ("0", "100")),
        (attention(3, scale="log"), "percent of all, log scale", ("0.01", "100")),
        (positions(3, 3), "linear scale", ("-1", "1")),
    ):
        boxes = png_layout(heat).texts
        i = next(i for i, box in enumerate(boxes) if box.text == name)
        ticks = boxes[i + 1 : i + 6]
        assert (ticks[0].text, ticks[-1].text) == ends
        assert all(left.x < right.x for left, right in pairwise(ticks))


def corners(box: TextBox, width: float) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom; letters are about 0.8 of their size high."""
    before = {"start": 0.0, "middle": width / 2, "end": width}[box.anchor]
    half = 0.4 * box.size
    if box.rotated:
        return box.x - half, box.y - (width - before), box.x + half, box.y + before
    return box.x - before, box.y - half, box.x - before + width, box.y + half


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("labeled", [True, False])
def test_texts_are_inside_the_picture_and_do_not_overlap(shape: tuple[int, int], labeled: bool):
    heat = positions(*shape)
    if labeled:
        heat = HeatMap(
            title="A title of many words that go on " * 5,
            values=np.abs(heat.values),
            rows=[HOSTILE[i % 10] * 3 for i in range(shape[0])],
            columns=[HOSTILE[i % 10] for i in range(shape[1])],
        )
    layout = Layout(heat, lambda text, size: 0.6 * size * len(text))
    boxes = [corners(box, 0.6 * box.size * len(box.text)) for box in layout.texts if box.text]
    for left, top, right, bottom in boxes:
        assert 0 < left < right < layout.width
        assert 0 < top < bottom < layout.height
    beside = [b for b in boxes if b[0] < layout.left or b[1] > layout.bottom or b[3] < layout.top]
    for a, b in combinations(beside, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


@pytest.mark.parametrize("heat", [attention(100, window=9), attention(256), positions(128, 64)])
def test_png_has_every_cell(heat: HeatMap):
    pixels, layout = picture(png(heat)), png_layout(heat)
    assert pixels.shape[:2] == (layout.height, layout.width)
    matrix = pixels[layout.top : layout.bottom, layout.left : layout.right, :3]
    expected = np.full((*heat.values.shape, 3), 255, np.uint8)
    for cell, color in visible_colors(heat).items():
        expected[cell] = color
    assert np.array_equal(matrix, expected.repeat(layout.cell, 0).repeat(layout.cell, 1))
    assert np.array_equal(cell_colors(heat), expected)


def test_png_of_a_small_matrix_has_numbers_in_its_cells():
    heat = attention(12)
    pixels, layout = picture(png(heat)), png_layout(heat)
    assert layout.cell == 40
    matrix = pixels[layout.top : layout.bottom, layout.left : layout.right, :3]
    colors = visible_colors(heat)
    for i, j in np.ndindex(heat.values.shape):
        cell = matrix[40 * i : 40 * i + 39, 40 * j : 40 * j + 39]
        assert tuple(cell[1, 1].tolist()) == colors.get((i, j), (255, 255, 255))
        assert (len(np.unique(cell.reshape(-1, 3), axis=0)) > 1) == ((i, j) in colors)


def test_png_distinguishes_characters_that_its_font_lacks():
    pytest.importorskip("PIL")
    drawings = [png(attention(3, labels=[label] * 3)) for label in ("日", "本", "é", "⏎", "n")]
    assert len({*drawings}) == 5


def test_pictures_of_256_tokens_are_small_and_take_below_2_seconds():
    noise = positions(256, 256)
    for heat in (attention(256), noise):
        start = time.process_time()
        drawing = svg(heat).encode()
        assert len(drawing) < 200_000
        assert len(vega(heat)["datasets"]["cells"]) == len(visible_colors(heat))
        assert time.process_time() - start < 2
    pytest.importorskip("PIL")
    for heat in (attention(256), noise):
        start = time.process_time()
        assert len(png(heat)) < 400_000
        assert time.process_time() - start < 2


def test_png_needs_pillow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError) as caught:
        png(attention(3))
    assert caught.value.message == "--png needs Pillow"
    assert caught.value.hint == "pip install 'tgen-lm[png]'"
