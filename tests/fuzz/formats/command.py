"""`tgen generate` in this process, on a model that is loaded once."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from typer import Exit

from fuzz.models import save_model
from tgen.cli import app, console, model_loading
from tgen.cli.generate.command import generate
from tgen.cli.generate.options import GenerateOptions
from tgen.config import EngineOptions
from tgen.loaded_model import LoadedModel, open_model

_MAX_TOKENS = 60  # of a command


class _Model(LoadedModel):
    """A model whose texts end, whatever is asked for."""

    n_tokens = 0  # of the last command

    def complete(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Yield the first tokens."""
        self.n_tokens = 0
        for token in itertools.islice(super().complete(*arguments, **options), _MAX_TOKENS):
            self.n_tokens += 1
            yield token


class Command:
    """The command, and what it wrote to stdout last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model"
        save_model(self._path, "llama", context_length=32)
        loaded = open_model(self._path, EngineOptions(device="cpu", threads=1))
        self._model = _Model(loaded.bundle, loaded.engine)
        self._write = console.write
        self.written = b""
        console.write = self._record
        model_loading.load_shared = lambda *_, **__: self._model  # type: ignore[assignment]
        app._report_bug = _raise

    def _record(self, data: bytes) -> None:
        self.written += data
        self._write(data)

    @property
    def was_cut(self) -> bool:
        """Whether the last command had perhaps more tokens."""
        return self._model.n_tokens == _MAX_TOKENS

    def generate(self, **options: Any) -> None:
        """Run the command without its parser, which takes longer than the rest."""
        self.written = b""
        with suppress(Exit):
            engine = EngineOptions(device="cpu", threads=1)
            generate(GenerateOptions(model=str(self._path), engine=engine, **options))

    def run(self, *arguments: str) -> int:
        """Run the command; an internal error is raised."""
        self.written = b""
        options = ["--model", str(self._path), "--device", "cpu", "--threads", "1"]
        status = app.run(["generate", *options, *arguments])
        if status == 130:
            raise KeyboardInterrupt
        assert status in (0, 1, 2), f"exit status {status}"
        return status


def _raise(error: Exception, *, debug: bool) -> int:
    del debug
    raise error
