"""Every place that deletes or replaces files touches files of tgen and whole models only."""

import ast
import json
from pathlib import Path

import pytest

from support.models import TEXT, make_model
from support.runs import RUN_JSON, request
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.cli.app import run
from tgen.config.training import TrainConfig

SOURCE = Path(__file__).parents[2] / "src" / "tgen"
CALLS = {"unlink", "rmtree", "rmdir", "rename", "replacing", "ftruncate", "truncate", "publish"}
CALLS |= {"publish_folder", "publish_sealed", "write_output", "remove_leftovers"}
OF_MODULES = {"remove", "append", "replace"}  # of `files` and `os`; lists and texts have them, too
# What the functions of a file that delete or replace may change
PLACES = {
    # Their argument, a temporary file, or what a link of temporary names brings back
    "storage/files": "replacing publish publish_folder write_output append remove rename "
    "_remove_leftover _restore _staging",
    "storage/sealed_file": "publish_sealed",
    # The lock of a run or of a start, or a new one: COMMANDS
    "storage/locks": "lock",
    # Files of the cache, by name and owner, in a directory that only tgen's user can write to
    "engine/cpu/kernel_cache": "store_object",
    "engine/weights_cache": "_store clear check _make_room",
    # A model that was found to be whole, or the one of a run: COMMANDS
    "checkpoint/model_dir": "save publish_model",
    "checkpoint/export": "export_gguf export_transformers",
    # A card that tgen wrote and nobody edited, or a new one: tests/runs/test_model_card.py
    "checkpoint/model_card": "save",
    "runs/remove_model": "remove_model",
    # A file that was found to be a prompt cache: COMMANDS
    "checkpoint/prompt_cache": "save",
    # A file that the user names, unless it belongs to a model: COMMANDS
    "cli/bench/output": "write_report",
    # A new file that the user names: tests/cli/generate/test_chat_commands.py
    "cli/generate/chat_commands": "_save",
    "cli/output_options": "write_contents",
    # The record of a sweep, in a new directory or of that sweep: tests/experiments/test_sweep.py
    "experiments/sweep": "_save",
    # Files of a run that was found to be one, or of a start: COMMANDS
    "corpus/text_index": "save",
    "runs/output_folder": "_clean_up",
    "runs/session": "resume",
    "runs/log": "flush _trim_file",
    "runs/saved_state": "create_run save_general save_record save_tokens drop_other_tokens "
    "save_state begin_state drop_old_states _set_aside save_progress drop_states_after remove_run "
    "remove_leftovers",
}


def deleting_functions(path):
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {call.id for call in calls if isinstance(call, ast.Name)} & CALLS - {"rename"}
            for call in calls:
                if isinstance(call, ast.Attribute):
                    module = isinstance(call.value, ast.Name) and call.value.id in ("files", "os")
                    names |= {call.attr} - (set() if module else OF_MODULES)
            if names & (CALLS | OF_MODULES):
                yield function.name


def test_the_table_has_every_place_that_deletes_or_replaces():
    found = {
        path.relative_to(SOURCE).with_suffix("").as_posix(): sorted(deleting_functions(path))
        for path in SOURCE.rglob("*.py")
    }
    table = {name: sorted(functions.split()) for name, functions in PLACES.items()}
    assert {name: functions for name, functions in found.items() if functions} == table


CONFIG, PORT = json.dumps({"model_type": "llama"}), json.dumps({"port": 80})
FOREIGN = {
    "text": {"thesis.txt": "mine"},
    "settings": {"config.json": PORT, "vocab.json": "{}", "merges.txt": "mine"},
    "weights": {"config.json": PORT, "model.safetensors": "mine"},
    "adapter": {"adapter_config.json": PORT, "adapter_model.safetensors": "mine"},
    "tokenizer": {"tokenizer.json": "{}", "vocab.json": "{}"},
    "tensors": {"train.safetensors": "mine", "tokenizer.json": "{}"},
    "logs": {"training/log.jsonl": "mine", "training/tensorboard/events": "mine"},
    "record": {"training/run.json": '{"lr": 1}', "training/state-00000001/x": "mine"},
    "lists": {"training/run.json": "[]", "config.json": CONFIG, "tokenizer.json": "{}"},
    "locked": {"training/LOCK": "held by cron", "training/tokenizer.json": "mine"},
    "database": {"training/LOCK": "", "training/tokens.safetensors": "mine", "training/DB": "mine"},
    "model and logs": {
        "config.json": CONFIG,
        "model.safetensors": "",
        "training/log.jsonl": "mine",
    },
    "model and run": {"config.json": CONFIG, "model.safetensors": "", "training/run.json": "{}"},
    "run": {"training/run.json": RUN_JSON, "config.json": PORT, "vocab.json": "mine"},
}
TRAIN = ["train", "corpus.txt", "--size", "nano", "--steps", "1", "--quiet", "--out"]
EXPORT = ["export", "model", "--overwrite", "--to"]
COMMANDS = {
    "train": [*TRAIN, "{}"],
    "replace": [*TRAIN, "{}", "--overwrite"],
    "plan": [*TRAIN, "{}", "--dry-run"],
    "resume": ["train", "--resume", "--quiet", "--out", "{}"],
    "directory": [*EXPORT, "transformers", "--out", "{}"],
    "file": [*EXPORT, "gguf", "--out", "{}"],
    "file inside": [*EXPORT, "gguf", "--out", "{file}"],
    "remove": ["models", "rm", "{}", "--yes"],
    "cache": ["generate", "-m", "model", "-p", "a", "-n", "1", "--save-cache", "{file}"],
}
MODEL, RUN = {"config.json", "model.safetensors"}, {"training", "training/run.json"}
MEANT = {"run": RUN, "model and run": MODEL, "model and logs": MODEL}  # to be removed


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.fixture
def model(tokenizer, tmp_path, monkeypatch):
    """A working directory with a corpus and a model."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_bytes(TEXT)
    random = make_model("llama", vocab_size=tokenizer.vocab_size)
    model_dir.save(Path("model"), random.config, tokenizer, random.to_arrays())


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FOREIGN)
def test_directories_of_other_programs_stay(kind, command):
    folder = Path("other")
    for name, content in FOREIGN[kind].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    before, first = contents(folder), next(iter(FOREIGN[kind]))
    words = [word.format(folder, file=folder / first) for word in COMMANDS[command]]
    status = run(words)
    gone = MEANT.get(kind, set()) if command == "remove" else set()
    assert (status == 0) == bool(gone)
    kept = {path: before[path] for path in before if str(path.relative_to(folder)) not in gone}
    after = contents(folder)
    if kind == "run":  # it is one of tgen, which may be locked
        after.pop(folder / "training" / "LOCK", None)
    assert after == kept


def test_files_beside_those_of_a_run_stay(tmp_path):
    start = request(tmp_path, "mine", tensorboard=True)
    list(runs.start(start))
    out, notes = tmp_path / "mine", ["a.txt", "training/b", "training/tensorboard/c"]
    notes += ["training/damaged-state-notes", "training/tokens-of-mine.safetensors"]
    for name in notes:
        (out / name).write_text("mine")
    settings = {"overwrite": True, "train": TrainConfig(steps=14, seed=1)}
    list(runs.start(request(tmp_path, "mine", **settings)))
    assert {name: (out / name).read_text() for name in notes} == dict.fromkeys(notes, "mine")
    assert run(["models", "rm", str(out), "--yes"]) == 0
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(
        out / name for name in notes
    )
