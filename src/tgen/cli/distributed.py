"""Run a command on all ranks that torchrun started.

With `tgen generate --input`, every rank reads the whole input and generates every n-th row, in
order; rank 0 writes all.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tgen import distributed
from tgen.cli import console
from tgen.distributed import Ranks
from tgen.errors import UsageError
from tgen.storage import files
from tgen.version import __version__

if TYPE_CHECKING:
    from tgen.cli.generate.options import GenerateOptions


@contextmanager
def all_ranks(paths: Sequence[str]) -> Iterator[bool]:
    """Join the other ranks; yield whether this process prints."""
    distributed.check_launcher()
    if not distributed.launched():
        yield True
        return
    with distributed.join_process_group(console.print_error, console.print_status):
        if "-" in paths:
            raise UsageError("several processes cannot share stdin", "name a file")
        distributed.assert_same("the command line", shlex.join(sys.argv[1:]))
        console.quiet |= not distributed.is_rank_zero()
        yield distributed.is_rank_zero()


@contextmanager
def join_ranks(options: "GenerateOptions") -> Iterator[Ranks]:
    """Yield this process's rank once all ranks have the same input; rank 0 of 1 without torchrun.

    Raise UsageError without --input, and all errors of `distributed.join_process_group`.
    """
    if options.input_file is not None:
        distributed.check_launcher()
    own = distributed.ranks()
    if own.world_size == 1:
        yield own
        return
    path = options.input_file
    if path is None:
        message = f"{own.world_size} ranks were started for a single prompt"
        raise UsageError(message, "pass --input, whose rows are shared, or run without torchrun")
    with all_ranks([path]):
        distributed.assert_same("the version of tgen", __version__)
        distributed.assert_same(f"the content of {path}", files.sha256(Path(path)).hex())
        distributed.barrier()
        yield own
