"""The braille canvas draws each dot, and axes have round ticks."""

import random

import pytest

from tgen.drawing.braille_plot import Axis, Canvas


def drawing(canvas: Canvas) -> list[str]:
    return [line.plain for line in canvas.lines()]


def test_each_dot_has_its_braille_character():
    for y in range(4):
        for x in range(2):
            canvas = Canvas(1, 1)
            canvas.dot(x, y)
            assert drawing(canvas) == ["⡀⢀⠄⠠⠂⠐⠁⠈"[2 * y + x]]


def test_lines_and_marks_are_drawn_and_outside_dots_ignored():
    canvas = Canvas(4, 2)
    canvas.line([(0, 0), (7, 7)])
    canvas.line([(7, 0)])
    assert drawing(canvas) == ["  ⡠⠊", "⡠⠊ ⢀"]
    canvas.mark(2, 5, "○")
    assert drawing(canvas) == [" ○⡠⠊", "⡠⠊ ⢀"]
    canvas.line([(-3, 3), (20, 3)])
    for x, y in ((-1, 0), (8, 0), (0, -1), (0, 8)):
        canvas.dot(x, y)
        canvas.mark(x, y, "!")
    assert drawing(canvas) == [" ○⡠⠊", "⡩⠋⠉⢉"]


def test_distant_points_are_clipped_before_they_are_drawn():
    for at in ((0, 0), (3, 5), (0, 10**15), (10**15, 3)):
        for end in ((10**15, 5), (3, -(10**15)), (-(10**15), 10**15)):
            near, far = Canvas(4, 2), Canvas(4, 2)
            far.line([at, end])
            for i in range(-200, 200):  # the same dots, one by one
                n = max(abs(end[0] - at[0]), abs(end[1] - at[1]))
                for start in (
                    0,
                    *((-a * n // (b - a)) for a, b in zip(at, end, strict=True) if a != b),
                ):
                    if 0 <= start + i <= n:
                        steps = [(b - a) * (start + i) / n for a, b in zip(at, end, strict=True)]
                        near.dot(*(a + round(d) for a, d in zip(at, steps, strict=True)))
            assert drawing(far) == drawing(near)


def test_steep_line_has_no_gap():
    canvas = Canvas(1, 3)
    canvas.line([(0, 11), (1, 0)])
    assert drawing(canvas) == ["⡇", "⢣", "⢸"]


def test_axis_maps_its_ends_and_has_round_ticks():
    axis = Axis(low=-1, high=3, dots=9)
    assert [axis.dot(value) for value in (-1, 0, 3, 4)] == [0, 2, 8, 10]
    assert Axis(low=0, high=2000, dots=9).ticks(5) == [0, 500, 1000, 1500, 2000]
    assert Axis(low=2.03, high=2.41, dots=9).ticks(5) == pytest.approx([2.1, 2.2, 2.3, 2.4])
    assert Axis(low=5, high=5, dots=9).ticks(5) == [5]
    assert Axis(low=5, high=5, dots=9).dot(5) == 0
    generator = random.Random(0)
    for _ in range(300):
        low = generator.uniform(-10, 10) * 10 ** generator.uniform(-5, 5)
        axis = Axis(low=low, high=low + 10 ** generator.uniform(-3, 6), dots=9)
        rounding = 1e-12 * (abs(axis.low) + abs(axis.high))
        for max_ticks in (2, 5, 9):
            ticks = axis.ticks(max_ticks)
            assert len(ticks) <= max_ticks
            assert all(axis.low - rounding <= t <= axis.high + rounding for t in ticks)
