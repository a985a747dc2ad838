"""Every option with odd values: it works, or the error names it."""

import io
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise

import pytest
import typer
from typer.testing import CliRunner

from tgen.cli import console
from tgen.cli.app import COMMANDS as COMMAND_NAMES
from tgen.cli.app import make_app, run
from tgen.cli.bench.options import BenchOptions
from tgen.cli.export import ExportOptions
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.models import ModelsOptions
from tgen.cli.options import Reader, make_command, nested, read_prompt
from tgen.cli.score import ScoreOptions
from tgen.cli.tokenize import TokenizeOptions
from tgen.cli.train.command import TrainOptions
from tgen.config import SamplingConfig
from tgen.config.option import check_ranges, option
from tgen.errors import UsageError

VALUES = (None, "some", "nan", "inf", "-1", "1e30", "", "twice")
COMMANDS = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
NEEDED = {  # by an option to have an effect
    "--logprobs": ["--json"],
    "--explain": ["--json"],
    "--input": ["--jsonl"],
    "--samples": ["--jsonl"],
    "--length": ["--kv-cache"],
    "--fail-if-slower": ["--compare", "then.json"],
}
TABLE = [
    (command, name, value)
    for command in ("generate", "inspect", "bench")
    for parameter in COMMANDS[command].params
    for name in parameter.opts[:1]
    for value in VALUES
    if not parameter.hidden and (name not in ("--prompt", "--help") or value is not None)
]


def test_every_sampling_field_is_an_option_of_generate():
    assert len(TABLE) >= 500
    known = {field.name for field in fields(SamplingConfig)}
    assert known <= {parameter.name for parameter in COMMANDS["generate"].params}


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = option(3, "Size.", "--size -s", low=1, expected="positive")
    names: list[str] = option(default_factory=list, help_text="Names.", flags="--name")
    double: int = option(0, "Twice.", "--double", panel="Last")
    hidden: int = 7

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Outer:
    word: str = option("a", "Word.", "--word")
    color: str = option("no", "Color.", "--color", needs="double word=b")
    silent: bool = option(
        False, "Silent.", "--silent", excludes="color=red size", hint="choose one"
    )
    quiet: bool = option(False, "Quiet.", "--quiet", panel="First")
    inner: dict = nested(Inner, double=Reader(str, lambda text: 2 * int(text)))


def parse(*arguments: str) -> Outer:
    seen = []

    def show(options: Outer) -> None:
        """Show."""
        seen.append(options)
        Inner(**options.inner)

    app = typer.Typer()
    app.command()(make_command(show, Outer, ("First", "Last")))
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_only_given_options_of_a_nested_dataclass_are_collected():
    assert parse() == Outer(inner={})
    assert parse("--size", "3") == Outer(inner={"size": 3})  # given, though it is the default
    assert parse("-s", "4", "--quiet") == Outer(quiet=True, inner={"size": 4})
    assert parse("--name", "a", "--name", "b") == Outer(inner={"names": ["a", "b"]})
    assert parse("--double", "4") == Outer(inner={"double": 8})


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--silent", "--size", "3"], "--silent cannot be combined with --size", "choose one"),
        (
            ["--silent", "--color", "red", "--word", "b"],
            "--silent cannot be combined with --color red",
            "choose one",
        ),
        (
            ["--color", "blue"],
            "--color needs --double or --word b",
            "add --double, or remove --color",
        ),
    ],
)
def test_combined_options_are_checked_as_declared(arguments, message, hint):
    with pytest.raises(UsageError) as error:
        parse(*arguments)
    assert error.value.message == message
    assert error.value.hint == hint


def test_other_values_and_options_are_combined():
    assert parse("--silent", "--color", "blue", "--word", "b").silent
    assert parse("--color", "red", "--double", "1").color == "red"


@pytest.mark.parametrize(
    "options",
    [
        BenchOptions,
        ExportOptions,
        GenerateOptions,
        ModelsOptions,
        ScoreOptions,
        TokenizeOptions,
        TrainOptions,
    ],
)
def test_declared_combinations_name_other_options_of_the_command(options):
    declared = [one for one in fields(options) if "nested" not in one.metadata]
    declared += [
        inner
        for outer in fields(options)
        if "nested" in outer.metadata
        for inner in fields(outer.metadata["nested"])
    ]
    names = {one.name for one in declared}
    combined = 0
    for one in declared:
        details = f"{one.metadata.get('excludes', '')} {one.metadata.get('needs', '')}"
        others = {other.partition("=")[0] for other in details.split()}
        assert others <= names - {one.name}, one.name
        combined += len(others)
    assert combined


def test_errors_name_the_flag_where_they_name_the_field():
    with pytest.raises(UsageError, match=r"^--size: invalid value 0$") as error:
        parse("--size", "0")
    assert error.value.hint == "set --size to positive"


def test_a_whole_number_may_have_zeros_after_its_point(capsysbinary):
    number = -(2**63) + 1  # has more digits than a float
    for text in (f"{number}", f"{number}.0", f"{number}.00"):
        assert run(["generate", "--top-k", text]) == 2
        message = f"error: --top-k: invalid value {number}\nhint: set --top-k to a number of"
        assert capsysbinary.readouterr().err.decode().startswith(message)


@pytest.mark.parametrize("text", ["5.5", ".0", "5.", "1e3", "5.0.0", ""])
def test_other_text_is_not_a_whole_number(text, capsysbinary):
    assert run(["generate", "--top-k", text]) == 2
    message = f"error: --top-k: invalid value {text!r}\nhint: set --top-k to a whole number\n"
    assert capsysbinary.readouterr().err.decode() == message


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("inspect --view heads --view bogus", "--view: invalid value 'bogus'",
         "set --view to one of attention, heads, "),
        ("export x --to onnx", "--to: invalid value 'onnx'", "set --to to one of gguf, tr"),
        ("inspect extra", "got unexpected extra", 'pass a text as --prompt "TEXT"'),
        ("serve extra", "got unexpected extra", "name the model as --model NAME"),
        ("bench extra", "got unexpected extra", "name the model as --model NAME"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_named_with_what_to_write(arguments, error, hint, capsysbinary):
    assert run(arguments.split()) == 2
    lines = capsysbinary.readouterr().err.decode().splitlines()
    assert lines[0].startswith(f"error: {error}")
    assert lines[1].startswith(f"hint: {hint}")


def test_help_shows_a_default_of_zero(capsysbinary):
    assert run(["bench", "--help"]) == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    [i] = [i for i, line in enumerate(lines) if "--seed" in line]
    assert "[default: 0]" in lines[i] + lines[i + 1]
    assert not any("[default: False]" in line for line in lines)


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("command", ["", *COMMAND_NAMES])
def test_help_fits_the_terminal_and_nothing_is_cut(command, columns, capsysbinary, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert run([*([command] if command else []), "--help"]) == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert all(len(line) <= int(columns) for line in lines)
    assert not any("…" in line for line in lines)
    for one, following in pairwise(lines):
        # A paragraph is as wide as the terminal: the next word did not fit.
        words = following.split()
        if one.startswith(" ") and following.startswith(" ") and one.strip() and words:
            assert len(one.rstrip()) + 1 + len(words[0]) > int(columns) - 1, one


@pytest.mark.parametrize("command", ["generate", "inspect", "bench"])
def test_every_option_accepts_or_refuses_odd_values(
    command, trained, capsysbinary, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    base = [command, "-m", str(trained)] + {
        "generate": ["-p", "The", "-n", "2", "-q", "--threads", "1"],
        "inspect": ["-p", "The", "-q"],
        "bench": ["--trials", "1", "-q", "--no-limits"],
    }[command]
    answers = set()
    for _, name, value in [row for row in TABLE if row[0] == command]:
        if name == "--live":  # serves until a signal
            continue
        typed = {None: [name], "twice": [name, "1", name, "2"]}.get(value, [name, value])
        flag = next(p for p in COMMANDS[command].params if name in p.opts).is_flag
        if flag:  # alone, with a value, twice
            typed = {None: [name], "twice": [name, name]}.get(value, [f"{name}={value}"])
        arguments = [*base, *NEEDED.get(name, []), *typed]
        status = run(arguments)
        said = capsysbinary.readouterr().err.decode()
        answers.add(status)
        case = f"{arguments} -> {status}: {said}"
        assert "Traceback" not in said, case
        assert status in (0, 1, 2), case
        if status == 2:
            assert len(said.strip().splitlines()) <= 3, case
            assert name in said or name.strip("-").replace("-", "_") in said, case
        if status == 1:  # a file or model that does not exist
            assert said.startswith("error: "), case
        if value in ("nan", "inf", "1e30") and name in ("--temperature", "--top-p", "--top-k"):
            assert status == 2 or (name, value) == ("--temperature", "1e30"), case
    assert answers >= {0, 2}


def test_an_option_given_twice_has_its_last_value(trained, capsysbinary):
    base = ["generate", "-m", str(trained), "-p", "The", "-n", "5", "-q", "--seed"]
    assert run([*base, "3"]) == 0
    expected = capsysbinary.readouterr().out
    assert run([*base, "1", "--seed", "3"]) == 0
    assert capsysbinary.readouterr().out == expected


def test_reading_a_prompt_file_shows_progress(tmp_path, monkeypatch):
    shown: list[object] = []

    @contextmanager
    def bar(label, **_):
        shown.append(label)
        yield shown.append

    monkeypatch.setattr(console, "late_progress", bar)
    (tmp_path / "prompt").write_bytes("é".encode("utf-16"))
    assert read_prompt(None, tmp_path / "prompt") == "é".encode()
    assert shown[0] == "reading the prompt"
    assert len(shown) > 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_prompt_on_stdin_has_no_byte_order_mark(monkeypatch, capsysbinary, encoding):
    stdin = io.TextIOWrapper(io.BytesIO("é 𝄞\n".encode(encoding)))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_prompt(None) == "é 𝄞\n".encode()
    noted = f"read as {encoding}-le".encode() in capsysbinary.readouterr().err
    assert noted == (encoding in ("utf-16", "utf-32"))


@pytest.mark.parametrize("command", ["generate", "bench", "train"])
def test_threads_have_the_same_limits_in_every_command(command, capsysbinary):
    corpus = ["corpus.txt"] if command == "train" else []
    for number in ("0", "1025"):
        assert run([command, *corpus, "--threads", number]) == 2
        err = capsysbinary.readouterr().err.decode()
        assert f"--threads: invalid value {number}" in err
        assert "from 1 to 1,024" in err


@pytest.mark.parametrize("command", ["", *COMMAND_NAMES])
def test_help_labels_neither_flags_nor_arguments_with_a_type(command, capsysbinary):
    assert run([*([command] if command else []), "--help"]) == 0
    shown = capsysbinary.readouterr().out
    assert b"<bool>" not in shown
    assert b"list[" not in shown
