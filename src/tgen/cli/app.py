"""The command line: one app, one module a command, and the one place where errors become exits."""

import errno
import gc
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from tgen import __version__
from tgen.cli import console, signals
from tgen.cli.bench.command import bench
from tgen.cli.export import export
from tgen.cli.generate.command import generate
from tgen.cli.inspect.command import inspect
from tgen.cli.train.command import train
from tgen.distributed import launched, rank_zero_reports, ranks
from tgen.errors import ModelError, RankError, TgenError, UsageError, is_out_of_memory

app = typer.Typer(
    name="tgen",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _listening(command: Callable[..., None]) -> Callable[..., None]:
    """A command that is told of Ctrl-C, which before ends the process: there is nothing to save,
    and what is raised while others' modules are imported may be dropped."""

    @wraps(command)
    def begun(*arguments: Any, **options: Any) -> None:
        if command not in (train, generate) and ranks().world_size > 1:
            name = f"tgen {command.__name__}"
            raise UsageError(f"{name} is no work for several ranks", "start it without torchrun")
        signals.listen()
        command(*arguments, **options)

    return begun


for _command in (train, generate, inspect, bench, export):
    app.command()(_listening(_command))

_DISK = {
    errno.ENOSPC: "make room on that disk, and try again",
    errno.EDQUOT: "make room on that disk, and try again",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "choose a place that can be written",
}
_NO_MEMORY = ("there is not enough memory", "choose a smaller model, batch or context")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tgen {__version__}")
        raise typer.Exit


@app.callback()
def _tgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a bug.")] = False,
) -> None:
    """Train a small language model on your own text, generate from it, look inside, measure.

    Exit status: 0 done, also when the reader closed the pipe; 1 failed; 2 wrong use; 70 a bug; 75
    the run belongs to another process; 128 + n after signal n.
    """


def main() -> None:
    """Runs the command line and leaves the process with its exit status."""
    console.ensure_standard_fds()
    for stream in (sys.stdout, sys.stderr):  # what is written does not depend on the locale
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    status = run(sys.argv[1:])
    signals.restore_default_handlers()
    if launched():  # torch's threads go on, may want Python once more, and would die of its end
        console.flush()
        os._exit(status)
    gc.freeze()  # at its end Python would look through all there is for garbage: 150 ms
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Runs one command; its exit status."""
    try:
        if {"-h", "--help", "--version"} & set(arguments):
            console.require_stdout()
        result = app(arguments, prog_name="tgen", standalone_mode=False)
        console.close()
        return result if isinstance(result, int) else 0
    except (console.StdoutClosedError, BrokenPipeError):
        console.discard_stdout()
        return 0
    except SystemExit as stop:  # typer's own answer to a closed pipe while it shows help
        console.discard_stdout()
        return 0 if isinstance(stop.__context__, BrokenPipeError) else int(stop.code or 0)
    except RankError as error:  # it has been told
        return error.exit_status
    except TgenError as error:
        if isinstance(error, (UsageError, ModelError)) and not rank_zero_reports():
            return error.exit_status
        console.print_error(error.message, error.hint)
        return error.exit_status
    except TyperException as error:
        return _usage(error, arguments)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        console.print_error(
            f"tgen lacks the package {error.name}", "install it again: pip install tgen-lm"
        )
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        console.discard_stdout()
        where = f": {error.filename}" if error.filename else ""
        console.print_error(f"{error.strerror}{where}", _DISK.get(error.errno or 0, ""))
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            console.print_error(*_NO_MEMORY)
            return 1
        # A bug: the user sees one line, we need the traceback
        return _crash(error, debug="--debug" in arguments)


def _usage(error: TyperException, arguments: list[str]) -> int:
    message = " ".join(error.format_message().split())
    if not arguments:  # help was shown
        return 0
    if not rank_zero_reports():
        return error.exit_code
    commands = ("train", "generate", "inspect", "bench", "export")
    command = next((a for a in arguments if a in commands), "")
    console.print_error(
        message[:1].lower() + message[1:],
        f"`tgen {command} --help` lists the options".replace("  ", " "),
    )
    return error.exit_code


def _crash(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    else:
        with tempfile.NamedTemporaryFile("w", prefix="tgen-", suffix=".log", delete=False) as log:
            traceback.print_exception(error, file=log)
        console.print_error(
            f"internal error: {type(error).__name__}: {error}"[:300],
            f"this is a bug; the traceback is in {log.name}",
        )
    return 70
