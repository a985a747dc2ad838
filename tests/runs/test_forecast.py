"""Forecast of the loss of a longer run: synthetic curves, and where it is shown."""

import math
import shutil
from dataclasses import replace

import pytest

from support.runs import plan_of, request, resume
from tgen import runs
from tgen.cli.train.progress import TrainingProgress
from tgen.reports.training import DoneReport, EvalReport
from tgen.runs import forecast
from tgen.runs.forecast import forecast_gain

STEPS = range(10, 71, 10)  # of 100, at the constant learning rate


@pytest.mark.parametrize(
    ("epochs", "new_epochs"),
    [(0.3, 0.6), (10, 1 + 15.4 * (1 - math.exp(-19 / 15.4)))],  # repeated tokens teach less
)
def test_gain_follows_the_power_law(epochs, new_epochs):
    def loss(epochs: float) -> float:
        more = max(0.0, epochs - 1)
        return 1 + (min(epochs, 1) + 15.4 * (1 - math.exp(-more / 15.4))) ** -0.25

    curve = [(step, loss(epochs * step / 100)) for step in STEPS]
    expected = 1.125 * (loss(epochs) - (1 + new_epochs**-0.25))
    assert forecast_gain(curve, 100, epochs=epochs, times=2.0) == pytest.approx(expected)
    rounded = 0.666667 / 0.3333333  # twice the minutes, as the command to continue has them
    assert forecast_gain(curve, 100, epochs=epochs, times=rounded) == pytest.approx(expected)
    half = forecast_gain(curve, 100, epochs=epochs, times=1.5)
    assert half is not None
    assert 0 < half < expected


@pytest.mark.parametrize(
    ("curve", "times"),
    [
        ([3.0, 2.8, 2.7], 2.0),  # too few evaluations
        ([3.0, 2.8, 2.7, 2.6, 2.65, 2.7], 2.0),  # the loss rises again
        ([3.0, 2.99, 2.97, 2.9, 2.8, 2.6], 2.0),  # it falls faster and faster
        ([3.0, 2.8, 2.7, 2.65, 2.62, 2.6], 1.2),  # within the decay
        ([3.0, 2.8, 2.7, 2.65, 2.62, 2.6], 4.0),  # further than measured
    ],
)
def test_other_curves_have_no_forecast(curve, times):
    evaluations = list(zip(STEPS, curve, strict=False))
    assert forecast_gain(evaluations, 100, epochs=1, times=times) is None


def test_forecast_is_in_the_result_and_in_the_plan_of_the_longer_run(tmp_path, monkeypatch, capsys):
    curves = []

    def gain(evaluations, steps, *, times, **_):
        curves.append((evaluations, steps, times))
        return 0.1 if times == 2 else 0.001

    monkeypatch.setattr(forecast, "forecast_gain", gain)
    steady = {"eval_every": "2", "warmup_steps": "3", "learning_rate": "0.001"}
    reports = list(runs.start(request(tmp_path, overrides=steady)))
    done, out = reports[-1], tmp_path / "model"
    assert isinstance(done, DoneReport)
    assert done.forecast is not None
    assert done.best_bits_per_byte is not None
    assert done.forecast.steps == 28
    assert done.forecast.bits_per_byte == done.best_bits_per_byte - 0.1
    constant = [
        (r.step, r.bits_per_byte)
        for r in reports
        if isinstance(r, EvalReport) and 3 < r.step <= 10  # the decay begins there
    ]
    assert curves == [(constant, 14, 2.0)]
    with TrainingProgress(json_lines=False) as progress:
        progress.show(done)
        minutes = replace(done.forecast, minutes=20.0)
        progress.show(replace(done, forecast=minutes))
    shown = capsys.readouterr().err.splitlines()
    expected = f"would give about {done.forecast.bits_per_byte:.3f} ±0.100 bits/byte"
    assert f"forecast: another 14 steps {expected}" in shown
    assert f"continue with: tgen train --resume --override --steps 28 --out {out}" in shown
    assert f"forecast: another 10 minutes {expected}" in shown
    longer = {"override": True, "threads": 1, "settings": {"steps": 21}}
    shutil.copytree(out, tmp_path / "changed")
    changed = resume(tmp_path / "changed", **longer, overrides={"learning_rate": "0.002"})
    assert plan_of(changed).forecast is None
    shutil.copytree(out, tmp_path / "edited")
    log = tmp_path / "edited" / "training" / "log.jsonl"
    log.write_text(log.read_text().replace('"bits_per_byte": ', '"bits_per_byte": "much", "": '))
    assert plan_of(resume(tmp_path / "edited", **longer)).forecast is None
    reports = list(resume(out, **longer))
    plan = plan_of(reports)
    assert curves[-1] == (constant, 14, 1.5)
    bits_per_byte = done.best_bits_per_byte - 0.001
    assert plan.forecast is not None
    assert plan.forecast.steps == 21
    assert plan.forecast.bits_per_byte == bits_per_byte
    with TrainingProgress(json_lines=False) as progress:
        progress.show(plan)
    shown = capsys.readouterr().err
    assert f"{bits_per_byte:.3f} ±0.005 bits/byte" in shown  # never more certain than seeds allow
    assert isinstance(reports[-1], DoneReport)
    assert reports[-1].forecast is None  # its curve has two decays
