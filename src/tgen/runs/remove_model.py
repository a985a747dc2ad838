"""Remove a model, with the training state of its run. Without torch."""

import sys
from contextlib import ExitStack
from pathlib import Path

from tgen.checkpoint.model_files import files_of_a_model, is_whole
from tgen.checkpoint.model_lookup import shipped_model
from tgen.checkpoint.stored_models import ADAPTER_CONFIG, gguf_parts
from tgen.errors import UsageError
from tgen.runs import saved_state
from tgen.runs.output_folder import lock_existing
from tgen.storage import files


def check_removable(path: Path) -> None:
    """Raise UsageError unless a path is a GGUF file, damaged or not, or a directory with a model,
    an adapter or a run."""
    if path.is_symlink():
        raise UsageError(f"{path} is a link", "name the model that it leads to")
    if path.resolve() == shipped_model().resolve():
        raise UsageError(f"{path} is the model shipped with tgen", "choose another model")
    if path.is_file():
        is_model = path.suffix == ".gguf"
    else:
        is_model = is_whole(path) or saved_state.is_run(path)
    if not is_model:
        raise UsageError(
            f"{path} is not a model",
            "name a GGUF file, or a directory with config.json and model.safetensors",
        )


def remove_model(path: Path) -> list[str]:
    """Remove a model; return the names of other files in its directory, which stay.

    Nothing outside the directory changes; links in it are removed, not what they lead to. Raises
    UsageError as `check_removable`, and LockedError while a run trains the model.
    """
    check_removable(path)
    path = path.resolve()
    if path.is_file():
        for part in gguf_parts(path):
            files.remove(part)
        return []
    with ExitStack() as stack:
        stack.enter_context(lock_existing(path))
        own, training = set(files_of_a_model(path)), saved_state.folder(path)
        has_run = saved_state.is_run(path) and not training.is_symlink()
        beside = saved_state.other_names(path) if has_run else []
        if has_run and not beside:
            own.add(training.name)
        others = sorted(entry.name for entry in path.iterdir() if entry.name not in own)
        others = [name for name in others if name != training.name or not beside]
        others += [f"{training.name}/{name}" for name in beside]
        if sys.platform == "win32":
            stack.close()  # Windows cannot rename a directory with an open file
        if not others:
            files.remove(path)
            return []
        main = ("config.json", ADAPTER_CONFIG)
        for name in sorted(own, key=lambda name: name not in main):  # then it is no model
            files.remove(path / name)
        if beside:
            saved_state.remove_run(path)
            files.remove(training / saved_state.LOCK)
    return others
