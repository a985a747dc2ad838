"""Every benchmark script runs with --quick, writes its result file, and leaves results/ alone."""

import json
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from support.command import PythonFork
from versus import harness

LIBRARIES = {
    *("harness", "chromium", "decode.model_shapes", "decode.runtime_worker"),
    *("learning.nanogpt", "learning.scoring", "serving.http_client", "tuning.chats"),
}
ROOT = Path(harness.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}
SCRIPTS = sorted(MODULES - LIBRARIES)


def list_results() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in harness.RESULTS.iterdir()}


def test_libraries_exist() -> None:
    assert LIBRARIES < MODULES


@pytest.mark.parametrize("name", SCRIPTS)
def test_quick_mode_runs(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(harness.ROOT)
    monkeypatch.setattr(subprocess, "Popen", PythonFork)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the models are too small for more
    before = list_results()
    script = import_module(f"versus.{name}")
    script.main(["--quick", "--out", str(tmp_path / "result.json")])
    printed = capsys.readouterr()
    if printed.err.startswith("skipped: ") and not printed.out:
        pytest.skip(printed.err)
    assert len(printed.out.splitlines()) >= 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"command", "date", "machine", "tgen"} < result.keys()
    assert list_results() == before


def test_quick_mode_writes_no_result_file_without_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    parser = harness.make_parser("A benchmark.", "result.json")
    parser.add_argument("--rounds", type=int, default=5)
    quick = harness.parse(parser, ["--quick"], {"rounds": 1})
    harness.save(quick, {"a": 1})
    assert quick.rounds == 1
    assert harness.parse(parser, ["--quick", "--rounds", "2"], {"rounds": 1}).rounds == 2
    assert list(tmp_path.iterdir()) == []
    harness.save(harness.make_parser("A benchmark.", "result.json").parse_args([]), {"a": 1})
    assert json.loads((tmp_path / "result.json").read_text())["a"] == 1
