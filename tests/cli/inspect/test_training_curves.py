"""Seeing a run: the dots, the axes, the series, the figure, the command."""

import json
import math
import random
from typing import Any

import pytest

from support.command import tgen
from tgen.cli.app import run
from tgen.cli.inspect.tables.training_curves import training_figure
from tgen.cli.render.braille_plot import Axis, Canvas
from tgen.errors import TrainingError
from tgen.inspection.training_curves import smooth, training_curves
from tgen.runs.storage import log as run_log


def drawing(canvas: Canvas) -> list[str]:
    return [line.plain for line in canvas.lines()]


def log(n_steps: int, *, every: int = 0) -> list[dict[str, Any]]:
    """A run whose loss halves every 100 steps, and is 1 bit a byte for each nat a token."""
    records: list[dict[str, Any]] = [
        {"kind": "PlanReport", "batch_size": 8, "context_length": 32, "resumed_at_step": 0}
    ]
    for step in range(1, n_steps + 1):
        loss = 1 + 8 * 0.5 ** (step / 100)
        fields = {"step": step, "seconds": step * 0.6, "loss": loss}
        pace = {"learning_rate": 0.002, "tokens_per_second": 1000.0 + step}
        records.append({"kind": "StepReport"} | fields | pace)
        if every and step % every == 0:
            fields["loss"] += 1 if step > 300 else 0
            records.append({"kind": "EvalReport", "bits_per_byte": fields["loss"]} | fields)
    return records


def test_dots_are_where_they_are_put():
    for y in range(4):
        for x in range(2):
            canvas = Canvas(1, 1)
            canvas.dot(x, y)
            assert drawing(canvas) == ["⡀⢀⠄⠠⠂⠐⠁⠈"[2 * y + x]]


def test_a_small_drawing():
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


def test_a_steep_line_has_no_gap():
    canvas = Canvas(1, 3)
    canvas.line([(0, 11), (1, 0)])
    assert drawing(canvas) == ["⡇", "⢣", "⢸"]


def test_an_axis_has_its_ends_at_the_ends_and_round_ticks():
    axis = Axis(low=-1, high=3, dots=9)
    assert [axis.dot(value) for value in (-1, 0, 3, 4)] == [0, 2, 8, 10]
    assert Axis(low=0, high=2000, dots=9).ticks(5) == [0, 500, 1000, 1500, 2000]
    assert Axis(low=2.03, high=2.41, dots=9).ticks(5) == pytest.approx([2.1, 2.2, 2.3, 2.4])
    assert Axis(low=5, high=5, dots=9).ticks(5) == [5]
    assert Axis(low=5, high=5, dots=9).dot(5) == 0
    draw = random.Random(0)
    for _ in range(300):
        low = draw.uniform(-10, 10) * 10 ** draw.uniform(-5, 5)
        axis = Axis(low=low, high=low + 10 ** draw.uniform(-3, 6), dots=9)
        rounding = 1e-12 * (abs(axis.low) + abs(axis.high))
        for most in (2, 5, 9):
            ticks = axis.ticks(most)
            assert len(ticks) <= most
            assert all(axis.low - rounding <= t <= axis.high + rounding for t in ticks)


def test_smoothing_is_a_mean_that_pulls_no_end_inwards():
    assert smooth([1, 2, 9, 4, 5], 1) == pytest.approx([1, 4, 5, 6, 5])
    straight = [0.5 * i for i in range(20)]
    assert smooth(straight, 4) == pytest.approx(straight)
    assert smooth([3.0], 5) == [3.0]


def test_curves_are_the_log_s_numbers():
    curves = training_curves(log(400, every=100))
    assert curves.steps == list(range(1, 401))
    assert curves.smoothed_over == 11
    assert curves.losses[0] == 1 + 8 * 0.5**0.01
    assert curves.losses[99] == pytest.approx(5, abs=0.01)
    assert curves.evaluation_steps == [100, 200, 300, 400]
    assert curves.bits_per_nat == 1
    assert (curves.best_step, curves.best_bits_per_byte) == (300, 2)  # 400 was worse
    assert curves.tokens == 400 * 8 * 32
    assert curves.median_tokens_per_second == 1200.5
    assert curves.sittings == 1
    nothing_held_out = training_curves(log(3))
    assert nothing_held_out.bits_per_nat is None
    assert nothing_held_out.best_step is None


@pytest.mark.parametrize("value", ["1.0", math.nan, [1]])
def test_a_log_without_a_needed_number_names_it(value):
    records = log(3)
    records[2]["loss"] = value
    with pytest.raises(TrainingError, match=r"StepReport .* as its loss"):
        training_curves(records)
    with pytest.raises(TrainingError, match="no step"):
        training_curves(log(0))


FIGURE = """\
bits/byte  ⠒⠒ training, 11-step mean  ○ held out  ● best
       8 ┤↑ ⠳⡀
         │   ⠙⢆
         │    ⠈⠳⣄
         │      ⠈⠢⡀
       6 ┤        ⠙⢦⡀
         │          ⠈⠲○
         │            ⠈⠳⢤⡀
       4 ┤               ⠉⠲⢤⡀
         │                  ⠉⠓⠦⣄⡀
         │                      ⠉⠓⠦○⣀
         │                          ⠈⠉⠓⠲⠤⣄⣀⡀               ○
       2 ┤                                 ⠉⠉⠓⠒●⠤⠤⣄⣀⣀⡀
         │                                           ⠉⠉⠉⠉⠒⠒⠒
         ├─ learning rate ──────────────────────────────────
   0.002 ┤⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉⠉
  rate 0 ┤
         └──────────────────────────────────────────────────
    step  0                       200                    400
 minutes  0.0                     2.0                    4.0

400 steps · 102,400 tokens · 4.0 minutes
best 2.000 bits/byte at step 300 · median 1,200 tokens/s
"""


def test_the_figure():
    lines = training_figure(training_curves(log(400, every=100)), width=60)
    assert "\n".join(line.plain.rstrip() for line in lines) == FIGURE.rstrip("\n")


@pytest.mark.parametrize("n_steps", [1, 2, 3, 50, 1001])
@pytest.mark.parametrize("every", [0, 1, 7])
@pytest.mark.parametrize("width", [10, 60, 99, 250])
def test_any_run_fits_any_width(n_steps, every, width):
    lines = training_figure(training_curves(log(n_steps, every=every)), width=width)
    assert max(line.cell_len for line in lines) <= max(60, width)
    assert len(lines) in (22, 23)
    text = "\n".join(line.plain for line in lines)
    assert ("bits/byte" in text) == (every in range(1, n_steps + 1))
    assert text.count("●") == (2 if "bits/byte" in text else 0)  # the legend's and the best


def test_the_command_draws_the_log(trained):
    shown = tgen("inspect", "--view", "training", "-m", trained, "-q", COLUMNS="40")
    lines = shown.stdout.decode().splitlines()
    expected = training_figure(training_curves(run_log.read(trained)), width=80)
    assert lines == [line.plain for line in expected]
    record = json.loads(tgen("inspect", "--view", "training", "-m", trained, "--json").stdout)
    assert record == {"schema": "tgen.inspect.training/1", "records": run_log.read(trained)}


def test_stdin_is_left_alone(trained, monkeypatch, capfd):
    def read(prompt: str | None) -> bytes:
        raise AssertionError(prompt)

    monkeypatch.setattr("tgen.cli.inspect.command.read_prompt", read)
    assert run(["inspect", "--view", "training", "-m", str(trained)]) == 0
    assert "best" in capfd.readouterr().out


def test_what_cannot_be_shown_is_one_line_with_a_remedy(trained, tmp_path):
    for arguments, status, words in (
        (["-m", tmp_path], 1, b"has no training log"),
        (["-m", trained, "-p", "x"], 2, b"--prompt"),
    ):
        result = tgen("inspect", "--view", "training", *arguments)
        assert result.returncode == status
        assert words in result.stderr.splitlines()[0]
        assert result.stderr.splitlines()[1].startswith(b"hint: ")
