"""Commands, flags and values in hints exist, and what a hint says works."""

import ast
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer

from support.adapters import save_adapter
from support.models import TEXT, make_model
from support.runs import request
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.cli import console
from tgen.cli.app import COMMANDS, make_app, run
from tgen.runs.overrides import parse_overrides

ROOT = Path(__file__).parents[2]
APP: Any = typer.main.get_command(make_app())
OPTIONS = {
    flag
    for command in APP.commands.values()
    for option in command.params
    for flag in (*option.opts, *option.secondary_opts)
}
CLASSES = {
    value
    for name, module in sys.modules.items()
    for value in vars(module).values()
    if name.startswith("tgen.") and isinstance(value, type) and dataclasses.is_dataclass(value)
}


def choices(kind):
    """Return the values of a Literal, or of one inside another type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next(filter(None, map(choices, get_args(kind))), ())


CHOICES = {
    flag: choices(field.type)
    for one in CLASSES
    for field in dataclasses.fields(one)
    for flag in field.metadata.get("flags", ())
    if choices(field.type)
}
OF_OTHERS = {"--nproc-per-node", "--nnodes", "--master-port", "--master-addr", "--help", "--debug"}
FLAG = r"(?<![\w-])--[a-z][a-z-]+"
WORDS = {"and", "or", "to", "takes", "needs", "has", "have", "cannot", "with", "if", "is"}


@cache
def texts():
    """Return the place and the text of every message in the source, with {} for its values."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {
            id(part)
            for node in ast.walk(tree)
            for part in (
                node.values
                if isinstance(node, ast.JoinedStr)
                else [node.value]
                if isinstance(node, ast.Expr)
                else []
            )
        }
        for node in ast.walk(tree):
            if id(node) not in inner and isinstance(node, ast.JoinedStr | ast.Constant):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                values = [part.value if isinstance(part, ast.Constant) else "{}" for part in parts]
                if all(isinstance(value, str) for value in values) and " " in "".join(values):
                    found.append((f"{path.name}:{node.lineno}", "".join(values)))
    return found


def find(pattern):
    """Return the matches of a pattern in all messages, with the place of each."""
    return [(match, place) for place, text in texts() for match in re.findall(pattern, text)]


def test_commands_flags_and_values_in_messages_exist():
    flags, settings = find(FLAG), find(r"--set (\w+)=(\w[\w.]*)")
    assert len(flags) > 300
    assert {name for name, _ in flags} <= OPTIONS | OF_OTHERS
    commands = {command for command, _ in find(r"(?:`|: )tgen (\w+)")}
    assert {"train", "export", "models", "generate"} <= commands <= set(COMMANDS)
    for (flag, value), place in find(rf"({FLAG}) ([a-z]\w*)"):
        assert value in {*CHOICES.get(flag, [value]), *WORDS}, f"{place}: {flag} {value}"
    assert {"--to", "--device", "--parallel"} <= set(CHOICES)
    for (name, value), _ in settings:
        parse_overrides({name: "2" if value == "N" else value})
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for extra, _ in find(r"pip install 'tgen-lm\[(\w+)\]'")}
    assert {"serve", "png", "tensorboard"} <= named <= set(extras["optional-dependencies"])


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    with chdir(folder):
        Path("corpus.txt").write_bytes(TEXT)
        random = make_model("qwen3", vocab_size=tokenizer.vocab_size, context_length=32)
        model_dir.save(Path("a model"), random.config, tokenizer, random.to_arrays())
        save_adapter(Path("an adapter"), Path("a model"))
        assert run(["export", "a model", "--to", "gguf", "--out", "file.gguf", "--quiet"]) == 0
        list(runs.start(request(folder, "a run")))
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A working directory with a corpus, a model, a run of one step, an adapter and a GGUF file."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = "train corpus.txt --threads 1 --set n_layers=1 --set d_model=16 --steps 1 --out new"
TRAIN = f"{RUN} --dry-run"  # makes all checks of a start
TUNE = f"{TRAIN} --from 'a model'".replace("--set n_layers=1 --set d_model=16", "")
GENERATE = "generate -m 'a model' -n 2 -p a"
# A command that fails, a part of its hint, and the command that follows the hint
FAILING = [
    (f"{RUN} --out 'a run'", "--overwrite to replace it", "{} --overwrite"),
    (f"{TRAIN} --set sliding_window=8", "remove it", TRAIN),
    (f"{TRAIN} --set attention_scale=2", "remove it", TRAIN),
    (f"{TRAIN} --set output_bias=true", "set output_bias to False", "{} --set output_bias=False"),
    (f"{TRAIN} --set minutes=3", "use --minutes",
     f"{TRAIN.replace('--steps 1', '')} --minutes .05"),
    (f"{TRAIN} --set layers=1", "did you mean n_layers?", TRAIN),
    (f"{TRAIN} --set bpe_dropout=.1 --tokenizer char", "remove bpe_dropout, or train with "
     "--tokenizer bpe", "{} --tokenizer bpe"),
    (f"{TUNE} --set context_length=64", "set context_length to at most 32",
     f"{TUNE} --set context_length=32"),
    (f"{TUNE} --set n_layers=1", "remove it", TUNE),
    (f"{TRAIN} --lora 2", "add --from", f"{TUNE} --lora 2"),
    (f"{TUNE} --adapter 'an adapter' --lora 2", "remove --lora", f"{TUNE} --adapter 'an adapter'"),
    (f"{TUNE} --from 'an adapter' --lora 2", "continue it with --adapter 'an adapter'",
     f"{TRAIN.replace('--set n_layers=1 --set d_model=16', '')} --adapter 'an adapter'"),
    (f"{TRAIN} --resume --size nano", "remove one of them", "train --resume --out 'a run'"),
    ("train --resume --out new", "remove --resume to start one", TRAIN),
    ("train --resume --out 'a run' --steps 20", "add --override", "{} --override"),
    ("train --resume --override --out 'a run' --steps 2", "set --steps above 14",
     "train --resume --override --out 'a run' --steps 15"),
    ("train --resume --out 'a run' --from 'a model'", "remove --from",
     "train --resume --out 'a run'"),
    ("train", "name a text file", TRAIN),
    ("generate -m 'a model' -n 999 -p a --overflow error", "use -n 32 or less, or add --overflow "
     "slide", "{} --overflow slide"),
    (f"{GENERATE} --engine torch --dtype int4", "--engine", GENERATE),
    (f"{GENERATE} --chat", "continue a prompt without --chat", GENERATE),
    (f"{TUNE} --adapter ''", "name a file or a directory", TUNE),
    ("train https://a.example/corpus.txt", "download it and name the file", TRAIN),
    (f"{GENERATE} --interactive", "remove --interactive", GENERATE),
    ("inspect -m 'a model' --view heads -p ''", "pass at least one character",
     "inspect -m 'a model' -p 'a b'"),
    ("export 'an adapter' --to gguf", "add --merge", "{} --merge"),
    ("export 'a model' --merge --to gguf --out new.gguf", "remove --merge",
     "export 'a model' --to gguf --out new.gguf"),
    ("export 'a model' --to gguf --out file.gguf", "add --overwrite", "{} --overwrite"),
    ("export 'a model' --to transformers", "name the directory", "{} --out new"),
    ("export 'a model' --to transformers --out new --type q8_0", "--to gguf",
     "export 'a model' --to gguf --type q8_0 --out new.gguf"),
    ("models rm", "name it: tgen models rm NAME", "models rm 'a model' --yes"),
    ("models rm 'a model'", "add --yes", "{} --yes"),
    ("models --yes", "remove --yes, or run: tgen models rm NAME --yes", "models"),
    ("models list x", "tgen inspect --view model describes a model",
     "inspect --view model -m 'a model'"),
    ("score corpus.txt -m 'a model' --stride 99", "set --stride to 32 or less",
     "score corpus.txt -m 'a model' --stride 32"),
    ("tokenize -m 'a model' --decode -p x", "--ids", "tokenize -m 'a model' --ids -p x"),
    ("bench -m 'a model' --trials 0", "--trials", "bench -m 'a model' -p 4 -n 2 --trials 1"),
]  # fmt: skip


@pytest.mark.parametrize(("failing", "part", "following"), FAILING)
@pytest.mark.usefixtures("folder")
def test_what_a_hint_says_works(failing, part, following, capsysbinary):
    assert run(shlex.split(failing)) in (1, 2)
    error = capsysbinary.readouterr().err.decode()
    assert part in error
    assert run(shlex.split(following.format(failing))) == 0


# A command, and one that it prints with its values, which works when it is run as it is
PRINTED = {
    "trained": (RUN, "try: tgen (.*)"),
    "prompt": (f"{RUN.replace('corpus.txt', 'rows.jsonl')} --overwrite", "try: tgen (.*)"),
    "exported": ("export 'a run' --to gguf --out 'x y.gguf'", "try: tgen (.*)"),
    "merged": ("export 'an adapter' --merge --to transformers --out 'x y'", "try: tgen (.*)"),
    "lost": ("generate -m 'a run' -p a", "`tgen (train --resume .*?)`"),
    "merge": (f"{TUNE} --from 'an adapter' --lora 2", "merge it: tgen (.*)"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", PRINTED)
def test_printed_command_works(kind, capsysbinary):
    rows = [{"prompt": f"Q: what is {i}?\nA: ", "completion": f"it is {i}"} for i in range(99)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command, pattern = PRINTED[kind]
    if kind == "lost":
        Path("a run/model.safetensors").unlink()
    run(shlex.split(command))
    (printed,) = re.findall(pattern, capsysbinary.readouterr().err.decode())
    assert run(shlex.split(printed.replace("DIR", "merged"))) == 0
    if kind == "lost":
        assert run(shlex.split(command)) == 0


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (b"GREMIO:\nGood morrow,", "'Good morrow,'"),
        ("Wer reitet so spät".encode(), "'Wer reitet so spät'"),
        (b"### Response:\n", "'### Response:'"),
        (b"it's -", "'it'\"'\"'s -'"),
        (b"-", "''"),
        (b"\xff\x00", "''"),
        (b"a" * 99, "a" * 60),
    ],
)
def test_command_to_try_has_a_prompt_that_can_be_typed(prompt, shown, capsys):
    console.print_try_generate("m", prompt=prompt)
    assert capsys.readouterr().err == f"try: tgen generate --model m --prompt {shown}\n"


@pytest.mark.parametrize(
    "prompt", ["what is 1 plus 1? ", "Q: it's\n\tA:\\ \u200b", " a\x85", "\U000e0001b\r"]
)
def test_command_to_try_has_the_exact_prompt_of_a_memorized_row(prompt, capsys):
    console.print_try_generate("m", prompt=prompt.encode(), exact=True)
    command = capsys.readouterr().err.removeprefix("try: tgen generate --model m --prompt ")
    script = f"printf %s {command}"
    shell = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert shell.stdout.decode() == prompt


@pytest.mark.parametrize(("prompt", "shown"), [(b"Q\x00\nA:", "A:"), (b"--", "''")])
def test_command_to_try_has_no_exact_prompt_that_cannot_be_an_argument(prompt, shown, capsys):
    console.print_try_generate("m", prompt=prompt, exact=True)
    assert capsys.readouterr().err == f"try: tgen generate --model m --prompt {shown}\n"


def test_chat_model_is_chatted_with(tokenizer, tmp_path, capsys):
    random = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "m", random.config, tokenizer, random.to_arrays())
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert run(["export", str(tmp_path / "m"), "--to", "gguf", "-o", str(tmp_path / "x.gguf")]) == 0
    assert "x.gguf --chat --interactive" in capsys.readouterr().err
