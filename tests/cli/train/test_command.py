"""`tgen train` from the command line: where its output goes, and its usage errors."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from support.command import clean_environment
from tgen.cli import console
from tgen.cli.train import progress
from tgen.reports.training import SampleReport, StepReport

TEXT = "What is a text? " * 300


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_dry_run_writes_the_plan_to_stdout(run_here, corpus, quiet):
    shown = run_here("train", "corpus.txt", "--steps", "3", "--dry-run", *quiet, cwd=corpus)
    assert shown.returncode == 0
    assert b"learning rate" in shown.stdout
    assert b"learning rate" not in shown.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_plan_on_a_terminal_begins_on_an_erased_line(corpus, monkeypatch):
    import pty

    parent_end, child_end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    command = [sys.executable, "-m", "tgen", "train", "corpus.txt", "--steps", "3", "--dry-run"]
    process = subprocess.Popen(
        command,
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        cwd=corpus,
        env=clean_environment(),
    )
    os.close(child_end)
    shown = b""
    with suppress(OSError):  # the terminal is closed
        while piece := os.read(parent_end, 1 << 16):
            shown += piece
    os.close(parent_end)
    assert process.wait() == 0
    assert "━".encode() in shown
    assert re.search(rb"\x1b\[2K(\x1b\[[0-9;]*m)*corpus ", shown)


def test_dry_run_with_json_writes_only_json_to_stdout(run_here, corpus):
    shown = run_here("train", "corpus.txt", "--steps", "3", "--dry-run", "--json", cwd=corpus)
    assert [json.loads(line)["kind"] for line in shown.stdout.splitlines()] == ["PlanReport"]
    assert b"learning rate" in shown.stderr


@pytest.mark.parametrize("words", [(), ("--tokenizer", "word")])
def test_unk_needs_a_tokenizer_of_words(run_here, corpus, words):
    shown = run_here(
        "train", "corpus.txt", "--unk", *words, "--steps", "3", "--dry-run", cwd=corpus
    )
    assert shown.returncode == (0 if words else 2)
    assert (b"--unk needs --tokenizer word\n" in shown.stderr) == (not words)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], b"--lora needs --from\nhint: add --from, or remove --lora"),
        (["--from", "m", "--adapter", "a"], b"--lora cannot be combined with --adapter"),
        (["--resume"], b"--lora cannot be combined with --resume\nhint: remove --lora"),
    ],
)
def test_lora_is_a_new_adapter_of_a_base_model(run_here, corpus, options, problem):
    refused = run_here("train", "corpus.txt", "--lora", "8", *options, cwd=corpus)
    assert refused.returncode == 2
    assert problem in refused.stderr


def test_error_in_a_setting_names_its_option(run_here, corpus):
    refused = run_here("train", "corpus.txt", "--set", "n_layers=0", "--dry-run", cwd=corpus)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"error: --set n_layers: invalid value 0" in refused.stderr


def test_file_that_is_no_tokenizer_is_named(run_here, corpus):
    refused = run_here("train", "corpus.txt", "--tokenizer", "corpus.txt", "--dry-run", cwd=corpus)
    assert refused.returncode == 1
    assert b"tokenizer 'corpus.txt': cannot read tokenizer.json" in refused.stderr
    assert b"hint: pass char, bpe, word, or the path of a tokenizer.json" in refused.stderr


def test_empty_out_is_refused(run_here, corpus):
    result = run_here("train", corpus, "--out", "")
    assert result.returncode == 2
    assert b"error: --out is empty\nhint: " in result.stderr


def test_progress_at_80_columns_keeps_the_bar_and_breaks_between_words(monkeypatch):
    output = io.StringIO()
    terminal = Console(file=output, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "err", terminal)
    monkeypatch.setattr(console, "draws_progress", lambda: True)
    view = progress.TrainingProgress(json_lines=False)
    report = StepReport(
        step=1117,
        loss=4.5,
        learning_rate=0.1,
        tokens_per_second=12345.0,
        seconds=1.0,
        fraction_done=1.0,
        seconds_left=51.0,
        other_cpus=1.7,
    )
    view._validation = " · validation 2.345 bits/byte"
    view.show(report)
    terminal.print(view._bar.get_renderable())
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("━" * 24)
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).replace("━", "").replace("╸", "").replace("╺", "").split()
    assert " ".join(words).startswith("step 1,117 · loss 4.500 · validation 2.345 bits/byte")
    assert "other processes use 1.7 of" in " ".join(words)
    assert words[-1] == "CPUs"


def test_long_sample_ends_after_a_word(capsys):
    with progress.TrainingProgress(json_lines=False) as view:
        view.show(SampleReport(step=1, prompt=b"To be", text=b" or not" * 30))
    assert capsys.readouterr().err == "  To be│" + " or not" * 21 + " or …\n"
