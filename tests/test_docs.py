"""The documentation matches the program, and output stays plain where it must."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import clean_environment, tgen
from test_architecture import ALLOWED

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*.md")])
MANUAL = ROOT / "docs" / "cli.md"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_manual_matches_commands():
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "manual.py"],
        check=True,
        capture_output=True,
        env=clean_environment(),
    )
    assert result.stdout.decode() == MANUAL.read_text()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@each_page
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@each_page
def test_mentioned_files_exist(page):
    text = page.read_text()
    for path in re.findall(r"`((?:src|versus|tests|scripts)/[\w./*-]+)`", text):
        assert [*ROOT.glob(path.rstrip("/"))], path
    for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text):
        roots = (ROOT, ROOT / "src" / "tgen", ROOT / "versus")
        assert any((root / path).exists() for root in roots), path


@each_page
def test_documented_options_exist(page):
    manual = MANUAL.read_text()
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", manual))
    blocks = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.DOTALL))
    for command in re.findall(r"\btgen ((?:[^\n|]|\\\n)*)", blocks.replace("\\\n", " ")):
        bare = re.sub(r"\"[^\"]*\"|'[^']*'|\s#.*", "", command)
        options = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", bare))
        assert options <= known, command


def test_architecture_page_lists_allowed_imports():
    page = (ROOT / "docs" / "architecture.md").read_text()
    documented = {}
    for line in re.findall(r"^\| `.*", page.split("## Contracts")[0], re.MULTILINE):
        packages, _, imports = line.strip("|").split("|")
        for package in re.findall(r"`(\w+)`", packages):
            documented[package] = set(re.findall(r"`(\w+)`", imports))
    allowed = {name: set(text.split()) - {"__version__"} for name, text in ALLOWED.items()}
    assert documented == {name: allowed[name] for name in allowed if not name.startswith("__")}


def test_python_examples_run(on_ranks, tmp_path):
    pytest.importorskip("transformers")
    text = (ROOT / "docs" / "python.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert "minutes=10" in code
    (tmp_path / "corpus.txt").write_text("To be, or not to be: that is the question.\n" * 300)
    shutil.copytree(ROOT / "models" / "shakespeare", tmp_path / "models" / "shakespeare")
    here = f"import os; os.chdir({str(tmp_path)!r})\n"
    [run] = on_ranks(code=here + code.replace("minutes=10", "steps=2"), n=1)
    assert run.status == 0, run.err


def test_programs_of_clients_are_complete():
    spec = importlib.util.spec_from_file_location("clients", ROOT / "scripts" / "clients.py")
    clients = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clients)
    text = (ROOT / "docs" / "clients.md").read_text()
    programs = clients.read_page(text)
    assert len(programs) == len(re.findall("<!-- (?:client:|replay of) ", text))
    assert {program.depends for program in programs} == {"", "auto", "model"}
    for program in programs:
        assert clients.ADDRESS in program.code
        assert clients.NAME in program.code or program.install[0] == "replay"
        if program.language == "python":
            compile(program.code, program.client, "exec")


def test_pictures_load_nothing_from_the_network():
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert not re.search(r"url\(\"?http|@import|href=\"http", picture.read_text())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_model_names(tmp_path, shell):
    for name in ("plays", "poems", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    request = {"COMP_WORDS": "tgen generate --model p", "COMP_CWORD": "3"}
    request |= {
        "_TYPER_COMPLETE_ARGS": "tgen generate --model p",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    result = tgen("ignored", cwd=tmp_path, _TGEN_COMPLETE=f"complete_{shell}", **request)
    assert result.returncode == 0, result.stderr
    assert b"plays" in result.stdout
    assert b"poems" in result.stdout
    assert b"other" not in result.stdout


def test_completion_of_options_has_a_line_each():
    request = {"_TYPER_COMPLETE_ARGS": "tgen generate --", "_TGEN_COMPLETE": "complete_fish"}
    result = tgen("ignored", _TYPER_COMPLETE_FISH_ACTION="get-args", **request)
    lines = result.stdout.decode().splitlines()
    assert len(lines) > 50
    assert all(line.startswith("--") and "\t" in line for line in lines)


@pytest.mark.parametrize("terminal", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_output_has_no_escape_codes_without_a_terminal(trained, terminal):
    for arguments in (["--help"], ["generate", "--help"], ["inspect", "-m", trained, "-p", "a"]):
        result = tgen(*arguments, **terminal)
        assert b"\x1b" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "locale"),
    [
        ("tokenize", {"LC_ALL": "C"}),
        ("tokenize", {"PYTHONIOENCODING": "latin-1"}),
        ("inspect", {"PYTHONUTF8": "0", "LC_ALL": "C"}),
    ],
)
def test_output_does_not_depend_on_the_locale(trained, command, locale):
    expected = tgen(command, "-m", trained, "-p", "é日")
    result = tgen(command, "-m", trained, "-p", os.fsencode("é日").decode(), **locale)
    assert result.stdout == expected.stdout
    assert not result.stdout.isascii()
