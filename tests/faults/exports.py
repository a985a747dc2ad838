"""SIGKILL while a model is written: the old model or the new one is found, never half of one.

    python tests/faults/exports.py [--long | COUNT]

The process dies at its k-th call that changes the disk, for every third k, or every k in the long
form, while it exports a model to a new or an existing directory or file, or replaces the model in a
directory with other files of a model. After each kill only whole models may be found, and the
user's files must be there. The next export to another place must remove what was left, and the old
or the new model must then be there.
"""

import itertools
import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny  # before numpy is imported

# isort: split
import story
from calls import CallCounter, Killer, intercept_calls
from tgen.checkpoint import chat_template, export, model_dir, model_lookup
from tgen.errors import ModelError, TgenError
from tgen.storage import files

_TEMPLATE = "{{ messages }}"
_NOTES = b"mine"


def main() -> int:
    """Kill every write at every call, `count` rounds."""
    count = tiny.count(__doc__, short=1, long=40)
    problems: list[str] = []
    n_kills = 0
    with tiny.scratch() as folder:
        os.chdir(folder)
        prepare()
        for n_round, (name, write) in itertools.product(range(count), WRITES.items()):
            rng = random.Random(tiny.seed + n_round)
            for k in itertools.count(1, 1 if count > 1 else 3):
                killed, problem = kill(write, Killer(k, torn=rng.random() < 0.5))
                n_kills += killed
                if problem:
                    problems.append(f"{name}, killed at call {k}: {problem}")
                if not killed:
                    break
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print(f"{n_kills:,} kills while a model was written: {len(problems)} problems")
    return int(bool(problems))


def prepare() -> None:
    """Make the model to export, and `before`: a folder of models as it is before each write."""
    save("source", 3)
    folder = Path("before")
    folder.mkdir()
    (folder / "notes.txt").write_bytes(_NOTES)
    for name in ("exported", "chat"):
        save(folder / name, 1)
    (folder / "chat" / "notes.txt").write_bytes(_NOTES)
    (folder / "chat" / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "chat" / "model-00001-of-00002.safetensors").write_bytes(b"x")
    shutil.copytree(folder / "exported", folder / "copy")
    to_gguf(folder / "m.gguf", model_dir.load(folder / "copy"))
    shutil.rmtree(folder / "copy")


def save(path: str | Path, number: int) -> None:
    """Save a model of `story`."""
    tokenizer = story._tokenizer("b" if number == 4 else "a")
    model_dir.save(Path(path), story._config(number), tokenizer, story._weights(number))


def to_gguf(out: Path, bundle: model_dir.ModelBundle) -> None:
    """Export a GGUF file."""
    export.export_gguf(bundle, out, name="m", stored="f32", progress=lambda _: None)


def to_directory(out: Path, bundle: model_dir.ModelBundle) -> None:
    """Export a directory in shards."""
    export.export_transformers(
        bundle, out, stored="f32", max_shard_bytes=2_000, progress=lambda _: None
    )


def source() -> model_dir.ModelBundle:
    """Load the model to export."""
    return story.load_model(Path("source"))


WRITES: dict[str, Callable[[], None]] = {
    "a new directory": lambda: to_directory(Path("models/new"), source()),
    "an existing directory": lambda: to_directory(Path("models/exported"), source()),
    "a new file": lambda: to_gguf(Path("models/new.gguf"), source()),
    "an existing file": lambda: to_gguf(Path("models/m.gguf"), source()),
    "a saved model": lambda: save("models/new", 4),
    "a replaced model": lambda: save("models/chat", 4),
}


def kill(write: Callable[[], None], killer: CallCounter) -> tuple[bool, str]:
    """Return whether `write` was killed, and the problem; empty: none."""
    shutil.rmtree("models", ignore_errors=True)
    shutil.copytree("before", "models")
    result = tiny.run_forked(partial(_write, write, killer))
    if not result.killed and result.status:
        return False, f"exit status {result.status}"
    return result.killed, _check_found() or _check_next_write(killed=result.killed)


def _write(write: Callable[[], None], killer: CallCounter, _: Any) -> None:
    with intercept_calls(killer):
        write()


def _check_found() -> str:
    """Return what is wrong with the models that are found; empty: nothing."""
    names = [name for name in model_lookup.list_models() if Path("models", name).exists()]
    try:
        for name in names:
            _check_model(Path("models", name))
        for path in Path("models").glob("*.gguf"):
            _check_model(path)
        found = model_lookup.find_model(None).path
    except TgenError as error:
        return error.message
    if found.name.startswith(files.TEMPORARY):
        return f"{found} is found"
    if not Path("models/notes.txt").exists() or not Path("models/chat/notes.txt").exists():
        return "the user's notes are gone"
    return ""


def _check_model(path: Path) -> None:
    """Raise ModelError unless this is a whole model, old or new."""
    bundle = story.load_model(path)
    (number,) = (n for n in (1, 3, 4) if bundle.config == story._config(n) and _same(bundle, n))
    if path.name != "chat":
        return
    try:
        template = chat_template.read_chat_template(path).source
    except ModelError:
        template = ""
    if template != (_TEMPLATE if number == 1 else ""):
        raise ModelError(f"model {number} with the template {template!r}", "")


def _same(bundle: model_dir.ModelBundle, number: int) -> bool:
    return story._same(bundle.arrays, story._weights(number))


def _check_next_write(*, killed: bool) -> str:
    """Return what is wrong after the next export to another place; empty: nothing."""
    if killed:
        to_gguf(Path("models/next.gguf"), source())
    if left := tiny.leftovers(Path("models")):
        inside = [path for path in left if Path(path).parent.name == "chat"]
        if not killed or inside != left:
            return f"left behind: {left}"
        save("models/chat", 4)
        if left := tiny.leftovers(Path("models")):
            return f"left behind after the next save: {left}"
    names = sorted(path.name for path in Path("models").iterdir())
    expected = {"chat", "exported", "m.gguf", "notes.txt"}
    if not expected <= set(names) or set(names) - expected - {"new", "new.gguf", "next.gguf"}:
        return f"the folder contains {names}"
    return _check_found()


if __name__ == "__main__":
    sys.exit(main())
