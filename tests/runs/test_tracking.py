"""Metrics in Weights & Biases and trackio, through modules that stand in for their libraries."""

import sys
from types import SimpleNamespace

import pytest

from support.runs import request, resume
from tgen import runs
from tgen.errors import UsageError
from tgen.reports.training import EvalReport, EventsReport, StepReport
from tgen.runs import tracking


class Library:
    """The functions of wandb and trackio that tgen calls."""

    def __init__(self, key=None, fails_at=None):
        self.opened, self.logged, self.n_finished = [], [], 0
        self.key = key
        self.fails_at = fails_at

    def login(self, *, prompt, verify):
        assert not prompt
        assert not verify
        return self.key is not None

    def init(self, **values):
        sys.stdout.write("a greeting")
        self.opened.append(values)

    def log(self, numbers, step):
        if step == self.fails_at:
            raise RuntimeError("no more")
        self.logged.append((step, numbers))

    def finish(self):
        self.n_finished += 1


@pytest.fixture
def library(monkeypatch):
    def install(name, **values):
        made = Library(**values)
        monkeypatch.setitem(sys.modules, name, made)
        found = SimpleNamespace(origin="a file")
        monkeypatch.setattr(tracking, "find_spec", lambda one: found if one == name else None)
        return made

    return install


@pytest.mark.parametrize(
    ("log", "mode"), [("trackio", None), ("wandb", "offline"), ("wandb:online", "online")]
)
def test_numbers_of_the_reports_are_logged(tmp_path, library, capsys, log, mode):
    made = library(log.partition(":")[0], key="secret")
    reports = list(runs.start(request(tmp_path, log=log)))
    (opened,) = made.opened
    assert opened.get("mode") == mode
    assert (opened["project"], opened["name"]) == ("tgen", "model")
    assert opened["config"]["d_model"] == 16
    assert opened["config"]["parameters"] > 1000
    steps = [report for report in reports if isinstance(report, StepReport)]
    logged = [(step, n["loss/train"]) for step, n in made.logged if "loss/train" in n]
    assert logged == [(report.step, report.loss) for report in steps]
    evaluations = [report for report in reports if isinstance(report, EvalReport)]
    validation = "bits_per_byte/validation"
    logged = [(step, n[validation]) for step, n in made.logged if validation in n]
    assert logged == [(report.step, report.bits_per_byte) for report in evaluations]
    assert made.n_finished == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("log", ["trackio", "wandb"])
def test_resumed_run_continues_its_log(tmp_path, library, log):
    made = library(log)
    list(runs.start(request(tmp_path, log=log), stopped=lambda: True))
    list(resume(tmp_path / "model"))
    first, second = made.opened
    assert second["resume"] == "allow"
    assert first.get("id") == second.get("id")
    assert (log == "trackio") == (first["resume"] == "never")  # another run may have its name
    steps = [step for step, numbers in made.logged if "loss/train" in numbers]
    assert steps == list(range(1, 15))


def test_missing_library_or_login_is_refused_before_training(tmp_path, library):
    for log in ("trackio", "wandb", "wandb:online"):
        library("other")
        with pytest.raises(UsageError, match=f"--log {log}: the package .* is missing") as error:
            list(runs.start(request(tmp_path, log=log)))
        assert error.value.hint == f"pip install {log.partition(':')[0]}"
    made = library("wandb")
    with pytest.raises(UsageError, match="wandb is not logged in") as error:
        list(runs.start(request(tmp_path, log="wandb:online")))
    assert error.value.hint == "run: wandb login"
    assert not made.opened
    assert not (tmp_path / "model").exists()


def test_directory_of_logs_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UsageError, match="the package wandb is missing"):
        tracking.require("wandb")


def test_failing_library_ends_its_log_and_not_the_run(tmp_path, library):
    list(runs.start(request(tmp_path, "without")))
    library("trackio", fails_at=4)
    reports = list(runs.start(request(tmp_path, "with", log="trackio")))
    (failed,) = [report for report in reports if isinstance(report, EventsReport)]
    assert (failed.step, failed.failed) == (4, "no more")
    assert failed.name == "the log of trackio"
    weights = [tmp_path / name / "model.safetensors" for name in ("without", "with")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
