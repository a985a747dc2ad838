"""`tgen compare`: tables, files, a text, and errors."""

import json
import os
import shutil

import pytest

from support.models import TEXT
from support.runs import simulate_run


@pytest.fixture
def compare(run_here, finished_run, tmp_path):
    """Run `tgen compare` on four simulated runs or on those that are named."""
    for family, seed in (("gpt2", 1), ("gpt2", 2), ("llama", 1), ("llama", 2)):
        out, losses = tmp_path / "runs" / f"{family}-{seed}", [3.0, 2.0 + seed / 10]
        simulate_run(out, finished_run / "model", losses, family=family, seed=seed)

    def run_compare(*arguments, runs=("runs",)):
        return run_here("compare", *runs, *arguments, cwd=tmp_path)

    return run_compare


def test_tables_and_curves_go_to_stdout(compare):
    done = compare()
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    for words in (
        "gpt2-1",
        "2.100",
        "settings that differ",
        "gpt2 (gpt2-1, gpt2-2)",
        "A gpt2-1",
        "└",
    ):
        assert words in out
    assert "bits per byte of the held-out text" in done.stderr.decode()
    assert compare("-q").stderr == b""


def test_groups_of_two_fields(compare):
    out = compare("--by", "family,seed", "--x", "time").stdout.decode()
    assert "means by family and seed" in out
    assert "2.100 ± –" in out
    out = compare("--by", "family").stdout.decode()
    assert "2.150 ± 0.635" in out


def test_files_are_written_beside_the_tables(compare, tmp_path):
    names = ["a.csv", "a.svg", "a.html", "a.md", "a.tex"]
    flags = ["--csv", "--svg", "--html", "--markdown", "--latex"]
    done = compare(*(word for pair in zip(flags, names, strict=True) for word in pair))
    assert done.returncode == 0, done.stderr
    assert b"gpt2-1" in done.stdout
    for name in names:
        assert (tmp_path / name).read_text()
        assert f"wrote {name}" in done.stderr.decode()
    done = compare("--csv", "-")
    assert done.stdout == (tmp_path / "a.csv").read_bytes()
    assert len(done.stdout.splitlines()) == 1 + 4 * 2


def test_json_has_runs_groups_and_warnings(compare):
    record = json.loads(compare("--by", "family,seed", "--json").stdout)
    assert record["schema"] == "tgen.compare/1"
    assert [run["name"] for run in record["runs"]][:2] == ["gpt2-1", "llama-1"]
    assert record["groups"][0]["best"] == {"mean": 2.1, "half_width": None, "n": 1}
    assert record["warnings"] == []


def test_text_is_scored_by_all_models_with_a_paired_test(run_here, trained, tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT[:3000])
    shutil.copytree(trained, tmp_path / "a")
    shutil.copytree(trained, tmp_path / "b")
    weights = tmp_path / "b" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 0x01  # an exponent's bit of one weight
    weights.write_bytes(content)
    shutil.copytree(trained, tmp_path / "c")
    (tmp_path / "c" / "model.safetensors").unlink()
    done = run_here("compare", "a", "b", "c", "--text", "text.txt", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    best, other, none = record["runs"]
    assert none["name"] == "c"
    assert none["text"] is None
    assert any("c is not scored" in warning for warning in record["warnings"])
    assert best["text"]["difference"] is None
    scored = run_here(
        "score", "-m", other["name"], "--compare", best["name"], "text.txt", "--json", cwd=tmp_path
    )
    total = json.loads(scored.stdout.splitlines()[-1])
    assert other["text"]["difference"] == total["difference"]
    assert other["text"]["score"]["nats"] == total["nats"]


def test_hostile_names_reach_no_terminal_and_no_file(run_here, finished_run, tmp_path):
    name = os.fsdecode(b"a\x1b[31m\xff\n<b>")
    for seed in (1, 2):
        out = tmp_path / "runs" / f"{name}{seed}"
        simulate_run(out, finished_run / "model", [2.0], seed=seed, state="stopped")
    flags = ("--csv", "--svg", "--html", "--markdown", "--latex")
    files = [word for flag in flags for word in (flag, f"x.{flag[2:]}")]
    done = run_here("compare", "runs", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"\\u001b" in done.stdout
    contents = [(tmp_path / f"x.{flag[2:]}").read_bytes() for flag in flags]
    for content in (done.stdout, done.stderr, *contents):
        assert b"\x1b" not in content
        content.decode()


@pytest.mark.parametrize(
    ("arguments", "runs", "words"),
    [
        ([], [], "no run to compare"),
        ([], ["nothing"], "nothing does not exist"),
        ([], ["no*"], "no directory matches 'no*'"),
        (["--by", "nothing"], ["runs"], "--by nothing: not a setting"),
        (["--by", ","], ["runs"], "--by: a setting is missing"),
        (["--x", "nothing"], ["runs"], "--x"),
        (["--json", "--svg", "x.svg"], ["runs"], "--json cannot be combined with --svg"),
        (["--svg", "x.svg", "--html", "./x.svg"], ["runs"], "same output file"),
        (["--threads", "1"], ["runs"], "cannot be used without --text"),
        (["--text", "nothing.txt"], ["runs"], "nothing.txt"),
    ],
)
def test_errors_have_one_line_and_a_hint(compare, arguments, runs, words):
    done = compare(*arguments, runs=runs)
    assert done.returncode in (1, 2)
    error, hint = done.stderr.decode().splitlines()
    assert words in error
    assert hint.startswith("hint: ")
    assert done.stdout == b""
