"""`tgen generate --input` on several ranks: each rank takes every n-th row, and rank 0 writes all.

Every rank reads the whole input and generates its own rows in order. At regular intervals all ranks
send the output of their next rows to rank 0, which sorts it.
"""

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tgen import distributed
from tgen.cli import console
from tgen.cli.distributed import all_ranks
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.generate.output import Generation, Writer
from tgen.cli.model_loading import load_model
from tgen.distributed import Ranks
from tgen.errors import UsageError
from tgen.machine.cpus import default_threads
from tgen.storage import files
from tgen.version import __version__

if TYPE_CHECKING:
    from tgen.loaded_model import LoadedModel


@contextmanager
def join_ranks(options: GenerateOptions) -> Iterator[Ranks]:
    """Yield this process's rank once all ranks have the same input; rank 0 of 1 without torchrun.

    Raise UsageError without --input, and all errors of `distributed.join_process_group`.
    """
    own = distributed.ranks()
    if own.world_size == 1:
        yield own
        return
    path = options.input_file
    if path is None:
        message = f"{own.world_size} ranks were started for a single prompt"
        raise UsageError(message, "pass --input, whose rows are shared, or run without torchrun")
    with all_ranks([path], quiet=options.quiet):
        distributed.assert_same("the version of tgen", __version__)
        distributed.assert_same(f"the content of {path}", files.sha256(Path(path)).hex())
        distributed.barrier()
        yield own


def load_shared(
    path: Path, adapter: Path | None, options: GenerateOptions, ranks: Ranks, *, quiet: bool
) -> "LoadedModel":
    """Load the model, the same on all ranks; ranks of one machine share its CPU cores."""
    from tgen.checkpoint.model_dir import digest

    engine = options.engine
    if ranks.world_size > 1 and engine.threads is None:
        engine = replace(engine, threads=default_threads(shared_by=ranks.local_world_size))
    model = load_model(path, engine, adapter=adapter, quiet=quiet)
    if ranks.world_size > 1:
        distributed.assert_same(f"the model {path}", digest(model.bundle)[:16])
    return model


class GatherWriter(Writer):
    """A writer that gathers all ranks' output on rank 0, which writes it in row order."""

    def __init__(
        self, to_bytes: Callable[[Generation], bytes], *, keep_tokens: bool, n_rows: int
    ) -> None:
        """Make a writer; ranks gather after every `n_rows` rows."""
        super().__init__(to_bytes, keep_tokens=keep_tokens)
        self._n_rows = self._next_gather = n_rows
        self._output: list[tuple[int, bytes]] = []

    def update(self) -> None:
        """Collect finished rows in order; gather once all rows before `_next_gather` are done."""
        while self._waiting:
            row = self._waiting[0].row
            if row >= self._next_gather:
                self._gather_and_write()
            elif self._waiting[0].output is not None:
                self._output.append((row, next(self._finished())))
            else:
                return

    def finish(self, n_rows: int) -> None:
        """Gather the rest of `n_rows` input rows."""
        while self._next_gather - self._n_rows < n_rows:
            self._gather_and_write()
        super().finish(n_rows)

    def _gather_and_write(self) -> None:
        outputs = distributed.gather(self._output)
        if outputs is not None:  # one rank generates all samples of a row, in order
            console.write(b"".join(text for _, text in heapq.merge(*outputs, key=itemgetter(0))))
        self._output = []
        self._next_gather += self._n_rows
