"""Training states: run.json, manifests with and without the right digest, tensors, and the log."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import tiny
from fuzz.formats.safetensors import SafetensorsFile
from fuzz.mutations import Mutator, dump
from tgen import runs
from tgen.checkpoint.safetensors_file import open_tensors, serialize
from tgen.cli import rich_console
from tgen.cli.compare import print_comparison
from tgen.cli.inspect.options import InspectOptions
from tgen.cli.inspect.training_curves import print_training_log
from tgen.cli.train.progress import TrainingProgress
from tgen.drawing.view_options import View
from tgen.errors import TgenError
from tgen.experiments.comparison import compare_runs
from tgen.runs import ResumeRequest, manifest

_PARTS = [f"state-0000{i}-of-00002.safetensors" for i in (1, 2)]
_FORGED = (*_PARTS, "tokens.safetensors")  # their digests are made to fit


def _split(state: Path) -> None:
    """Replace the file of a state by one per rank."""
    values = manifest.parse(state)
    arrays = open_tensors([state / "state.safetensors"])
    entries = {}
    for rank, name in enumerate(_PARTS):
        rows = {
            k: a[rank * a.shape[0] // 2 : (rank + 1) * a.shape[0] // 2]
            for k, a in arrays.items()
            if a.shape
        }
        if rank == 0:
            rows |= {key: array[...] for key, array in arrays.items() if not array.shape}
        content = serialize(rows)
        (state / name).write_bytes(content)
        entries |= manifest.describe({name: content})
    (state / "state.safetensors").unlink()
    del values["files"]
    (state / manifest.NAME).write_bytes(manifest.seal(values, entries))


class States:
    """A run whose newest state has two files is changed in one file, inspected, compared and
    resumed."""

    prints = True
    starts_processes = False

    def __init__(self, folder: Path) -> None:
        tiny.import_everything()
        rich_console.out._width = 100  # charts have the width of the terminal
        (folder / "corpus.txt").write_bytes(tiny.TEXT)
        self._base, self._out = folder / "base", folder / "out"
        last = [0]
        request = tiny.request(folder, self._base, steps=8)
        for report in runs.start(request, stopped=lambda: last[0] == 6):
            last[0] = getattr(report, "step", 0)
        training = self._base / "training"
        (self._state,) = (path.name for path in training.glob("state-*6"))
        self._run = json.loads((training / "run.json").read_bytes())
        del self._run["plan"]["train"]["compile"]  # a change to true would start compilers
        _split(training / self._state)
        self._manifest = json.loads((training / self._state / manifest.NAME).read_bytes())
        records = [json.loads(line) for line in (training / "log.jsonl").read_bytes().splitlines()]
        self._mutators = {
            "run.json": Mutator(self._run),
            "manifest.json": Mutator(self._manifest),
            "log.jsonl": Mutator(records),
        }
        paths = [
            *(training / self._state / name for name in _PARTS),
            training / "tokens.safetensors",
        ]
        self._tensors = {path.name: SafetensorsFile(path) for path in paths}
        self._names = ["run.json", "manifest.json", "manifest.json", "log.jsonl", *self._tensors]

    def change(self, i: int, rng: Random) -> str:
        """Copy the run and change one of its files."""
        shutil.rmtree(self._out, ignore_errors=True)
        shutil.copytree(self._base, self._out, copy_function=shutil.copyfile)
        training = self._out / "training"
        name, i = self._names[i % len(self._names)], i // len(self._names)
        if name in _FORGED:
            inside = training / self._state if name.startswith("state") else training
            file = self._tensors[name]
            file.path = inside / name
            what = file.change(i, rng)
            content = file.path.read_bytes()
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            if name.startswith("state"):
                entries = self._manifest["files"] | {name: entry}
                self._write_manifest(self._manifest | {"files": entries}, sealed=True)
            else:
                (training / "run.json").write_bytes(dump(self._run | {"tokens": entry}))
            return what
        document, what = self._mutators[name].change(i, rng)
        if name == "manifest.json":
            self._write_manifest(document, sealed=rng.random() < 0.8)
        elif name == "log.jsonl":
            lines = document if isinstance(document, list) else [document]
            content = b"".join(dump(line) + b"\n" for line in lines)
            (training / name).write_bytes(content[: rng.choice((None, None, None, -1, 100))])
        else:
            (training / name).write_bytes(dump(document))
        return f"{name}: {what}"

    def _write_manifest(self, document: Any, *, sealed: bool) -> None:
        path = self._out / "training" / self._state / manifest.NAME
        content = dump(document)
        try:
            values = json.loads(content)
            del values["sha256"]
        except (ValueError, TypeError, KeyError, RecursionError, IndexError):
            sealed = False
        if sealed:
            content = json.dumps(values | {"sha256": manifest._digest(values)}).encode()
        path.write_bytes(content)

    def read(self) -> None:
        """Print the log, compare the run, resume it, stop after a step, and print its reports."""
        for json_output in (False, True):
            with suppress(TgenError):
                print_training_log(
                    self._out, InspectOptions(view=[View.training], json=json_output)
                )
        with suppress(TgenError):
            print_comparison(compare_runs([self._out]))
        request = ResumeRequest(out=self._out, device="cpu", threads=1)
        with TrainingProgress(json_lines=False) as progress:
            for report in runs.resume(request, stopped=lambda: True):
                progress.show(report)
