"""Run a command on all ranks that torchrun started."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tgen import distributed
from tgen.cli import console
from tgen.errors import UsageError


@contextmanager
def all_ranks(paths: Sequence[str], *, quiet: bool = False) -> Iterator[bool]:
    """Join the other ranks; yield whether this process prints."""
    if not distributed.launched():
        yield True
        return
    print_status = partial(console.print_status, quiet=quiet)
    with distributed.join_process_group(console.print_error, print_status):
        if "-" in paths:
            raise UsageError("several processes cannot share stdin", "name a file")
        distributed.assert_same("the command line", shlex.join(sys.argv[1:]))
        yield distributed.is_rank_zero()
