"""`tgen train` from the command line: where its output goes, and its usage errors."""

import json
import os
import re
import sys
from contextlib import suppress

import pytest

from support.command import start

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
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), child_end)
    monkeypatch.setenv("TERM", "xterm")
    process = start("train", "corpus.txt", "--steps", "3", "--dry-run", cwd=corpus, **streams)
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


def test_error_in_a_setting_names_its_option(run_here, corpus):
    refused = run_here("train", "corpus.txt", "--set", "n_layers=0", "--dry-run", cwd=corpus)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"error: --set n_layers: invalid value 0" in refused.stderr


def test_file_that_is_no_tokenizer_is_named(run_here, corpus):
    refused = run_here("train", "corpus.txt", "--tokenizer", "corpus.txt", "--dry-run", cwd=corpus)
    assert refused.returncode == 1
    assert b"tokenizer 'corpus.txt': cannot read tokenizer.json" in refused.stderr
    assert b"hint: pass char, bpe, or the path of a tokenizer.json" in refused.stderr


def test_empty_out_is_refused(run_here, corpus):
    result = run_here("train", corpus, "--out", "")
    assert result.returncode == 2
    assert b"error: --out is empty\nhint: " in result.stderr
