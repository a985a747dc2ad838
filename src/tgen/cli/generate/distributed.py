"""`tgen generate --input` on several ranks: rows are dealt out in turn, and rank 0 writes them all.

Every rank reads the whole input and computes its own rows, one after another as there is room. Now
and then all ranks meet, each with the texts of its next rows, and rank 0 puts them in order.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgen import __version__, distributed
from tgen.cli import console
from tgen.cli.distributed import all_ranks
from tgen.cli.generate.input_rows import Generation
from tgen.cli.model_loading import ensure_kernels_compiled, load_model
from tgen.distributed import Ranks
from tgen.errors import UsageError
from tgen.model.cpu_count import cpu_count
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.api import Model


@contextmanager
def join_ranks(given: dict[str, Any]) -> Iterator[Ranks]:
    """The ranks that work on this command, once all are there and see the same rows; alone, rank 0
    of 1. Raises UsageError where there is nothing to share out, else as `distributed.join_process_group`."""
    mine = distributed.ranks()
    if mine.world_size == 1:
        yield mine
        return
    path, n = given["input_"], mine.world_size
    if path is None:
        raise UsageError(f"there are {n} ranks, and one prompt", "share out the rows of --input")
    with all_ranks([path], quiet=given["quiet"]):
        distributed.assert_same("the version of tgen", __version__)
        distributed.assert_same(f"the content of {path}", files.sha256(Path(path)).hex())
        if mine.local_rank == 0:  # for all of this machine
            ensure_kernels_compiled(given["device"], quiet=given["quiet"] or mine.rank > 0)
        distributed.barrier()
        yield mine


def load_shared(path: Path, given: dict[str, Any], ranks: Ranks, *, quiet: bool) -> "Model":
    """The model, the same one on all ranks; those of one machine share its processors."""
    from tgen.checkpoint.model_dir import digest

    threads = given["threads"]
    if ranks.world_size > 1 and threads is None:
        threads = cpu_count(shared_by=ranks.local_world_size)
    weights = given["weights"]
    model = load_model(path, device=given["device"], threads=threads, weights=weights, quiet=quiet)
    if ranks.world_size > 1:
        distributed.assert_same(f"the model {path}", digest(model.bundle)[:16])
    return model


class GatherWriter:
    """Brings this rank's texts to rank 0, which writes those of all ranks in the rows' order."""

    def __init__(self, shown: Callable[[Generation], bytes], *, n_rows: int) -> None:
        """`shown` is what is written of a text; the ranks meet after every `n_rows` rows of all."""
        self._shown = shown
        self._n_rows = self._end = n_rows  # where the ranks meet next
        self._waiting: deque[Generation] = deque()
        self._ready: list[tuple[int, bytes]] = []

    def begin(self, entry: Generation) -> None:
        """Another text will come, or the error in its place."""
        self._waiting.append(entry)

    def update(self) -> None:
        """Meets the others as often as all rows before are done."""
        while self._waiting:
            entry = self._waiting[0]
            if entry.row >= self._end:
                self._gather_and_write()
            elif entry.done:
                self._ready.append((entry.row, self._shown(entry)))
                self._waiting.popleft()
            else:
                return

    def finish(self, n_rows: int) -> None:
        """Meets the others for what is left of so many rows of all ranks."""
        while self._end - self._n_rows < n_rows:
            self._gather_and_write()

    def close(self) -> None:
        """What is not done is not written."""

    def _gather_and_write(self) -> None:
        texts = distributed.gather(self._ready)
        if texts is not None:  # samples of a row are of one rank, in their order
            console.write(b"".join(text for _, text in heapq.merge(*texts, key=itemgetter(0))))
        self._ready = []
        self._end += self._n_rows
