"""Signals to the command: before it starts, while it runs, while it exits."""

import signal
import subprocess
import sys

import pytest

from support.command import clean_environment, tgen
from support.models import TEXT
from support.runs import progress
from tgen import __main__
from tgen.cli import signals

PRESSED = """
import os, signal
from tgen.cli import app
from tgen.cli.train import progress
show = progress.TrainingProgress.show
def show_and_stop(view, report):
    show(view, report)
    if type(report).__name__ == "StepReport" and report.step == 14:
        os.kill(os.getpid(), signal.SIGINT)
progress.TrainingProgress.show = show_and_stop
os._exit(app.run({arguments!r}))
"""


def test_ctrl_c_saves_and_prints_the_command_to_resume(on_ranks, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    settings = ["d_model=16", "n_heads=2", "context_length=16", "batch_size=2"]
    settings += ["eval_every=10", "eval_tokens=64"]
    arguments = ["train", str(tmp_path / "corpus.txt"), "--steps", "30"]
    arguments += [f"--set={setting}" for setting in settings]
    assert tgen(*arguments, "--out", tmp_path / "whole").returncode == 0
    parts = [*arguments, "--out", str(tmp_path / "parts")]
    [run] = on_ranks(code=PRESSED.format(arguments=parts), n=1)
    assert run.status == 130, run.err
    assert "Traceback" not in run.err
    assert progress(tmp_path / "parts")["step"] == 14
    command = run.err.split("resume with: tgen ")[1].strip().split()
    assert tgen(*command).returncode == 0
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_second_ctrl_c_says_what_resumes(monkeypatch, capfdbinary):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop = signals.StopSignal()
    stop.is_training = stop.has_started = True
    stop._handle(signal.SIGINT, None)
    stop.explain()
    assert capfdbinary.readouterr().err == b""
    with pytest.raises(SystemExit, match="130"):
        stop._handle(signal.SIGINT, None)
    stop.explain()
    assert b"continues from the newest state" in capfdbinary.readouterr().err


def test_ctrl_c_during_import_prints_no_traceback(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "getsignal", interrupted)
    with pytest.raises(SystemExit, match="130"):
        __main__.main()


DROPPED = """
import os, signal, weakref
from tgen.cli import app
from tgen.runs import prepare
class Thing:
    pass
read = prepare.corpus.read_in_steps
def reading(*args, **options):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing  # Python drops what the callback raises
    return read(*args, **options)
prepare.corpus.read_in_steps = reading
os._exit(app.run({arguments!r}))
"""


def test_signal_whose_exception_python_drops_stops_after_the_first_step(on_ranks, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    out = tmp_path / "out"
    arguments = ["train", str(tmp_path / "corpus.txt"), "-o", str(out), "--steps", "9"]
    [run] = on_ranks(code=DROPPED.format(arguments=[*arguments, "--size", "nano"]), n=1)
    assert (run.status, "stopped and saved" in run.err) == (143, True)
    assert progress(out)["step"] == 1


IMPORTING = """
import signal, sys
from tgen.cli import app
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch.nn":
            signal.raise_signal(signal.SIGTERM)
sys.meta_path.insert(0, Finder)
status = app.run(sys.argv[1:])
print(status, "torch.nn" in sys.modules, file=sys.stderr)
"""


def test_signal_waits_for_the_import_of_torch(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    arguments = ["train", "corpus.txt", "-o", "models/out", "--steps", "9"]
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTING, *arguments],
        capture_output=True,
        cwd=tmp_path,
        env=clean_environment(),
        check=False,
    )
    *_, said, how = ended.stderr.decode().splitlines()  # after a slow phase has named itself
    assert said.startswith("stopped before the first step")
    assert how == "143 True"
    assert not (tmp_path / "models").exists()


def test_signal_while_python_exits_is_silent():
    code = (
        "import atexit, signal, sys; atexit.register(signal.raise_signal, signal.SIGINT);"
        "sys.argv = ['tgen', '--version']; from tgen.__main__ import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=clean_environment(), check=False
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")
