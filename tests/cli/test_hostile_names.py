"""No command lets a control character of a model, its name or a prompt reach the terminal."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from support.command import tgen
from support.models import TEXT
from tgen.cli.app import run
from tgen.drawing.view_options import View

ESCAPES = "\x1b]52;c;cm0=\x1b\\\x1b[2J\r\x9b\x07\u202e[red]"
NAME = f"m{ESCAPES}"


def _is_clean(text: bytes) -> bool:
    return all(c.isprintable() or c == "\n" for c in text.decode())


@pytest.fixture
def hostile(trained, tmp_path):
    """Return a copy of the trained model in a directory with a hostile name."""
    path = tmp_path / NAME
    shutil.copytree(trained, path, ignore=shutil.ignore_patterns("training"))
    return path


def _rename_tensor(path):
    file = path / "model.safetensors"
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    first = next(name for name in header if name != "__metadata__")
    header[f"x{ESCAPES}"] = header.pop(first)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])


def _change(name, **fields):
    def change(path):
        file = path / name
        values = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(values | fields))

    return change


DAMAGES = {
    "tensor name": _rename_tensor,
    "model type": _change("config.json", model_type=ESCAPES),
    "activation": _change("config.json", hidden_act=ESCAPES),
    "sizes": _change("config.json", num_hidden_layers=ESCAPES),
    "sampling": _change("generation_config.json", temperature=ESCAPES),
    "template": _change(
        "tokenizer_config.json", chat_template=f"{{{{ raise_exception('{ESCAPES}')"
    ),
    "tokenizer": _change("tokenizer.json", model={"type": ESCAPES}),
    "none": str,
}
COMMANDS = [
    ["generate", "-p", "x", "-n", "1", "--json"],
    ["generate", "-p", "x", "-n", "1", "--chat", "--json"],
    ["inspect", "-p", "x"],
    ["bench", "-p", "2", "-n", "2", "--trials", "1", "--no-limits"],
    ["export", "--to", "gguf"],
    ["score", f"{ESCAPES}.txt"],
    ["score", f"{ESCAPES}.txt", "--per-token"],
    ["score", f"{ESCAPES}.txt", "--json", "--per-token"],
    ["tokenize", "-p", ESCAPES],
    ["tokenize", f"{ESCAPES}.txt", "--json"],
    ["tokenize", f"{ESCAPES}.txt", "--count"],
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hostile_model_writes_no_control_character(damage, hostile, capsysbinary, monkeypatch):
    DAMAGES[damage](hostile)
    monkeypatch.chdir(hostile.parent)
    Path(f"{ESCAPES}.txt").write_text(f"x{ESCAPES}")
    for command in COMMANDS:
        model = [str(hostile)] if command[0] == "export" else ["-m", str(hostile)]
        status = run([*command, *model])
        out, err = capsysbinary.readouterr()
        assert status in (0, 1, 2), err
        assert _is_clean(err), (command, err)
        assert _is_clean(out), (command, out)
        assert err, command


@pytest.mark.parametrize("damage", ["model type", "none"])
def test_list_of_hostile_models_is_clean(damage, hostile, capsysbinary, monkeypatch):
    DAMAGES[damage](hostile)
    (hostile.parent / "models").mkdir()
    hostile.rename(hostile.parent / "models" / NAME)
    monkeypatch.chdir(hostile.parent)
    for more in ([], ["--json"], ["rm", f"models/{NAME}"], ["rm", f"models/{NAME}", "--yes"]):
        run(["models", *more])
        out, err = capsysbinary.readouterr()
        assert _is_clean(out + err), more
        assert b"u001b" in out + err, more
    assert not (hostile.parent / "models" / NAME).exists()


def test_every_view_of_a_hostile_prompt_is_clean(hostile, capsysbinary):
    others = {View.training, View.sources}
    views = [f"--view={view}" for view in View if view not in others]
    views += [f"--patch={ESCAPES[:-1]}?", "--contrast=b"]
    for more in ([], ["--json"], ["--width", "60"]):
        status = run(["inspect", "-m", str(hostile), "-p", ESCAPES, *views, *more])
        out, err = capsysbinary.readouterr()
        assert status == 0, err
        assert _is_clean(out + err), more


def test_hostile_arguments_are_quoted_without_control_characters(trained, capsysbinary):
    model = ["-m", str(trained)]
    for arguments in (
        ["generate", *model, "-p", "x", "--temperature", ESCAPES],
        ["generate", *model, "-p", "x", f"--{ESCAPES}"],
        ["generate", *model, "-p", "x", "--regex", f"({ESCAPES}"],
        ["generate", *model, "--input", ESCAPES],
        ["generate", "-m", ESCAPES, "-p", "x"],
        ["inspect", *model, "-p", "x", "--layer", ESCAPES],
        ["inspect", *model, "-p", "x", "--group", ESCAPES],
        ["inspect", *model, "-p", "x", "--patch", ESCAPES],
        ["inspect", *model, "-p", "x", "--activations", "x", "--parts", ESCAPES],
        ["inspect", *model, "-p", "x", "--view", "why", "--query", ESCAPES],
        ["bench", *model, "-p", ESCAPES],
        ["bench", *model, "--compare", ESCAPES],
        ["export", ESCAPES, "--to", "gguf"],
        ["score", ESCAPES],
        ["score", ESCAPES, "--compare", ESCAPES],
        ["tokenize", ESCAPES],
        ["tokenize", "-p", ESCAPES, "--decode"],
        ["models", ESCAPES],
        ["models", "rm", ESCAPES],
        ["train", ESCAPES],
        ["train", "x", "--set", f"{ESCAPES}=1"],
        [ESCAPES],
    ):
        assert run(arguments) in (1, 2), arguments
        out, err = capsysbinary.readouterr()
        assert out == b""
        assert _is_clean(err), (arguments, err)


def test_a_hostile_corpus_and_output_name_train_cleanly(tmp_path):
    (tmp_path / f"c{ESCAPES}.txt").write_bytes(TEXT + ESCAPES.encode())
    small = ["--steps", "2", "--set", "d_model=16", "--set", "n_heads=2"]
    for more in (["-o", tmp_path / NAME], ["--resume", "-o", tmp_path / NAME]):
        done = tgen(
            "train",
            *([] if "--resume" in more else [tmp_path / f"c{ESCAPES}.txt"]),
            *([] if "--resume" in more else small),
            *more,
        )
        assert _is_clean(done.stderr), done.stderr
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="names are texts elsewhere")
def test_a_directory_whose_name_is_not_utf8_can_be_exported(trained, tmp_path, monkeypatch):
    path = tmp_path / "m\udcff"
    shutil.copytree(trained, path, ignore=shutil.ignore_patterns("training"))
    monkeypatch.chdir(tmp_path)
    for command in (
        ["export", path, "--to", "gguf", "--out", "x.gguf"],
        ["inspect", "-m", path, "-p", "to be", "--activations", "a.safetensors"],
    ):
        assert tgen(*command).returncode == 0
    assert b"m?" in Path("x.gguf").read_bytes()
    assert b"m?" in Path("a.safetensors").read_bytes()
