"""`--view training`: the curves, the figure, and the command."""

import csv
import json
import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from support.command import tgen
from tgen.cli.app import run
from tgen.drawing.training_figure import training_figure
from tgen.errors import TrainingError
from tgen.runs import log as run_log
from tgen.runs.curves import smooth, training_curves


def log(n_steps: int, *, every: int = 0) -> list[dict[str, Any]]:
    """Return records whose loss halves every 100 steps; 1 nat per token is 1 bit per byte."""
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


def test_smoothing_is_a_centered_mean_at_the_ends_too():
    assert smooth([1, 2, 9, 4, 5], 1) == pytest.approx([1, 4, 5, 6, 5])
    straight = [0.5 * i for i in range(20)]
    assert smooth(straight, 4) == pytest.approx(straight)
    assert smooth([3.0], 5) == [3.0]


def test_curves_have_the_numbers_of_the_log():
    curves = training_curves(log(400, every=100))
    assert curves.steps == list(range(1, 401))
    assert curves.smoothing == 11
    assert curves.losses[0] == 1 + 8 * 0.5**0.01
    assert curves.losses[99] == pytest.approx(5, abs=0.01)
    assert curves.evaluation_steps == [100, 200, 300, 400]
    assert curves.bits_per_nat == 1
    assert (curves.best_step, curves.best_bits_per_byte) == (300, 2)  # 400 was worse
    assert curves.tokens == 400 * 8 * 32
    assert curves.median_tokens_per_second == 1200.5
    assert curves.n_sessions == 1
    assert curves.evaluation_tokens == [n * 8 * 32 for n in curves.evaluation_steps]
    without_evaluation = training_curves(log(3))
    assert without_evaluation.bits_per_nat is None
    assert without_evaluation.best_step is None


def test_smoothing_counts_the_steps_of_each_report():
    records = [one for one in log(4000) if one.get("step", 10) % 10 == 0]  # as on a GPU
    assert training_curves(records).smoothing == 110
    assert training_curves(records[:3]).smoothing == 10
    assert training_curves(records[:2]).smoothing == 1


def test_tokens_are_those_of_each_session():
    resumed = {"kind": "PlanReport", "batch_size": 16, "context_length": 32, "resumed_at_step": 250}
    curves = training_curves([*log(400, every=100), resumed])
    assert curves.evaluation_tokens == [n * 8 * 32 for n in (100, 200, 350, 550)]
    assert curves.tokens == 550 * 8 * 32


@pytest.mark.parametrize("value", ["1.0", math.nan, [1], 1e200])
def test_invalid_number_in_the_log_is_an_error_that_names_it(value):
    records = log(3)
    records[2]["loss"] = value
    with pytest.raises(TrainingError, match="invalid loss in a StepReport"):
        training_curves(records)
    with pytest.raises(TrainingError, match="no steps"):
        training_curves(log(0))


FIGURE = """\
bits/byte  ⠒⠒ training, 11-step mean  ○ validation  ● best
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
       0 ┤
         └──────────────────────────────────────────────────
    step  0                       200                    400
 minutes  0.0                     2.0                    4.0

400 steps · 102,400 tokens · 4.0 minutes
best 2.000 bits/byte at step 300 · median 1,200 tokens/s
"""


def test_figure_of_a_sample_run():
    lines = training_figure(training_curves(log(400, every=100)), width=60)
    assert "\n".join(line.plain.rstrip() for line in lines) == FIGURE.rstrip("\n")


@pytest.mark.parametrize("n_steps", [1, 2, 3, 50, 1001])
@pytest.mark.parametrize("every", [0, 1, 7])
@pytest.mark.parametrize("width", [10, 60, 99, 250])
def test_every_run_fits_every_width(n_steps, every, width):
    lines = training_figure(training_curves(log(n_steps, every=every)), width=width)
    assert max(line.cell_len for line in lines) <= max(60, width)
    assert len(lines) in (22, 23)
    text = "\n".join(line.plain for line in lines)
    assert ("bits/byte" in text) == (every in range(1, n_steps + 1))
    assert text.count("●") == (2 if "bits/byte" in text else 0)  # in the legend and at the minimum


def test_command_prints_the_figure_and_the_log(trained):
    shown = tgen("inspect", "--view", "training", "-m", trained, "-q", COLUMNS="40")
    lines = shown.stdout.decode().splitlines()
    expected = training_figure(training_curves(run_log.read(trained)), width=80)
    assert lines == [line.plain for line in expected]
    record = json.loads(tgen("inspect", "--view", "training", "-m", trained, "--json").stdout)
    assert record == {"schema": "tgen.inspect.training/1", "records": run_log.read(trained)}


def test_files_have_the_numbers_of_the_log(run_here, trained, tmp_path):
    names = ("a.csv", "a.svg")
    options = ["--csv", tmp_path / names[0], "--svg", tmp_path / names[1]]
    done = run_here("inspect", "--view", "training", "-m", trained, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    records = run_log.read(trained)
    steps = [record for record in records if record["kind"] == "StepReport"]
    assert [float(row["loss"]) for row in rows] == pytest.approx([one["loss"] for one in steps])
    bits = [row["validation_bits_per_byte"] for row in rows if row["validation_bits_per_byte"]]
    evaluations = [one["bits_per_byte"] for one in records if one["kind"] == "EvalReport"]
    assert [float(one) for one in bits] == pytest.approx(evaluations)
    root = ET.parse(tmp_path / "a.svg").getroot()
    titles = [one.text for one in root.iter() if one.tag.endswith("title")]
    assert titles == ["training", "training", "validation"]


def test_json_of_a_log_with_infinity_is_valid(tmp_path, capfd):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "log.jsonl").write_text('{"kind": "x", "a": Infinity, "b": 1e999}\n')
    assert run(["inspect", "-m", str(tmp_path), "--view", "training", "--json", "-q"]) == 0
    (record,) = json.loads(capfd.readouterr().out)["records"]
    assert record == {"kind": "x", "a": None, "b": None}


def test_stdin_is_not_read(trained, monkeypatch, capfd):
    def read(prompt: str | None) -> bytes:
        raise AssertionError(prompt)

    monkeypatch.setattr("tgen.cli.inspect.command.read_prompt", read)
    assert run(["inspect", "--view", "training", "-m", str(trained)]) == 0
    assert "best" in capfd.readouterr().out


def test_errors_have_one_line_and_a_hint(run_here, trained, tmp_path):
    for arguments, status, words in (
        (["-m", tmp_path], 1, b"has no training log"),
        (["-m", trained, "-p", "x"], 2, b"--prompt"),
    ):
        result = run_here("inspect", "--view", "training", *arguments)
        assert result.returncode == status
        assert words in result.stderr.splitlines()[0]
        assert result.stderr.splitlines()[1].startswith(b"hint: ")
