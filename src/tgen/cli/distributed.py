"""A command that runs on all the ranks that torchrun started."""

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
    """Joins those that torchrun started; whether this one is to show what happens."""
    if not distributed.launched():
        yield True
        return
    with distributed.join_process_group(
        console.print_error, partial(console.print_status, quiet=quiet)
    ):
        if "-" in paths:
            raise UsageError("stdin cannot be shared by ranks", "name a file")
        distributed.assert_same("the command line", shlex.join(sys.argv[1:]))
        yield distributed.is_rank_zero()
