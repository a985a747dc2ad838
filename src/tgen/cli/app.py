"""The command line: one app, one module per command; turns errors into exit statuses."""

import atexit
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from tgen.cli import console, signals, streams
from tgen.distributed import launched, rank_zero_reports, ranks
from tgen.errors import (
    ModelError,
    RankError,
    TgenError,
    UsageError,
    describe_os_error,
    is_out_of_memory,
)
from tgen.version import __version__

# A command's module is imported only when it is run or described: `tgen --help` stays fast.
COMMANDS = {
    "train": "Train a model on your text.",
    "sweep": "Train a model for every combination of values.",
    "generate": "Continue a text.",
    "inspect": "Show a model's attention, predictions and training history.",
    "compare": "Compare training runs: settings, losses, curves.",
    "score": "Measure how well a model predicts texts.",
    "bench": "Measure the model's speed on this machine.",
    "serve": "Serve models over OpenAI's and other HTTP APIs.",
    "export": "Convert a model to GGUF or to another dtype.",
    "tokenize": "Show how a model splits a text into tokens.",
    "models": "List the models on this machine, or remove some.",
}
_FOLDERS = ("train", "sweep", "generate", "inspect", "bench")  # commands of several files
_HELP = """Train a small language model on your own text, generate from it, inspect and measure it.

Exit status: 0 success (also when the reader closed the pipe), 1 failure, 2 usage error, \
70 internal error, 75 the run belongs to another process, 128 + n after signal n.

If an option is given twice, the last value counts, with a warning; some options are repeatable."""
_DISTRIBUTED = ("train", "generate")  # commands that torchrun may start
_INSTEAD_OF_ARGUMENTS = {
    **dict.fromkeys(("tgen generate", "tgen inspect"), 'pass a text as --prompt "TEXT"'),
    **dict.fromkeys(("tgen bench", "tgen serve"), "name the model as --model NAME"),
}
_DISK_HINTS = {
    errno.ENOSPC: "free disk space and try again",
    errno.EDQUOT: "free disk space and try again",
    **dict.fromkeys((errno.EROFS, errno.EPERM, errno.ENOENT), "choose a writable location"),
    errno.EACCES: "check its permissions and those of its directory",
    errno.EFBIG: "choose another file system, or raise the limit of file sizes (ulimit -f)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


class _LightStart:
    """A command or group without Typer's imports, which take longer than those of tgen."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, whose values stay text: `options.make_command` converts them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            # Typer takes no other classes for its parameters: the method is replaced in each.
            one.process_value = partial(_keep_text, one)
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help."""
        from tgen.cli.command_help import print_help

        print_help(self, ctx)


def _keep_text(parameter: Any, context: Any, value: Any) -> Any:
    """Return the value as it was typed; Typer would import pydantic to convert it."""
    if parameter.required and value in (None, ()):  # which Typer reports
        return type(parameter).process_value(parameter, context, value)
    callback = parameter.callback
    return callback(context, parameter, value) if callback else value


class _Command(_LightStart, TyperCommand):
    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, which warns of values that do not count."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            values, others, order = parse(args=args)
            single = [one for one in order if not getattr(one, "multiple", True)]
            for one in {one.name: one for one in single if single.count(one) > 1}.values():
                is_switch = getattr(one, "is_flag", False) and not one.secondary_opts
                if not (is_switch or values.get("quiet") or ranks().rank):
                    text = f"warning: {one.opts[0]} is given twice: only the last value counts"
                    console.print_line(text)
            return values, others, order

        parser.parse_args = parse_args  # type: ignore[method-assign]
        return parser


class _Group(_LightStart, TyperGroup):
    pass


def make_app(arguments: Sequence[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the app; only commands named in `arguments` have their options."""
    app = typer.Typer(
        name="tgen",
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_HELP)(_tgen)
    for name, summary in COMMANDS.items():
        if name in arguments:
            module = f"tgen.cli.{name}.command" if name in _FOLDERS else f"tgen.cli.{name}"
            command = import_module(module).command
            app.command(name, cls=_Command, help=command.__doc__)(_prepare(command))
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


def _not_loaded() -> None:
    raise AssertionError("only commands named in the arguments are loaded")


def _prepare(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that handles Ctrl-C and rejects multiple processes if not supported.

    Until it starts, Ctrl-C ends the process: there is nothing to save yet, and an exception raised
    while modules are imported may be dropped.
    """

    def run(*arguments: Any, **options: Any) -> None:
        if command.__name__ not in _DISTRIBUTED and ranks().world_size > 1:
            message = f"tgen {command.__name__} does not support multiple processes"
            raise UsageError(message, "run it without torchrun")
        signals.listen()
        gc.freeze()  # what is imported so far stays: no collection needs to look at it
        command(*arguments, **options)

    run.__signature__ = command.__signature__  # type: ignore[attr-defined]
    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tgen {__version__}")
        raise typer.Exit


def _flag(name: str, help_text: str, **more: Any) -> Any:
    return typer.Option(name, help=help_text, is_eager="callback" in more, **more)


def _tgen(
    version: Annotated[
        bool, _flag("--version", "Print the version.", callback=_print_version)
    ] = False,
    debug: Annotated[bool, _flag("--debug", "Print the traceback of an internal error.")] = False,
) -> None:
    """Show the version or set how errors are reported."""


def main() -> None:
    """Run the command line and exit with its status."""
    streams.ensure_standard_fds()
    streams.adapt_streams()
    status = run(sys.argv[1:])
    signals.restore_default_handlers()
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process, where possible without Python's shutdown, which takes 7 ms."""
    if not launched():  # else torch's threads may still call Python, and would crash in it
        others = set(threading.enumerate()) - {threading.current_thread()}
        if not all(thread.daemon for thread in others):
            gc.freeze()  # skips Python's last garbage collection, which takes 150 ms
            sys.exit(status)
        atexit._run_exitfuncs()
    console.flush()
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    completing = "_TGEN_COMPLETE" in os.environ
    if completing:
        os.environ["COLUMNS"] = "1000"  # shells read a line per candidate
    only_prints = not arguments or bool({"-h", "--help", "--version"} & set(arguments))
    console.command_words[:] = arguments
    try:
        if arguments and only_prints:
            console.require_stdout()
        app = make_app() if completing else make_app(arguments)
        result = app(arguments, prog_name="tgen", standalone_mode=False)
        console.close()
        return result if isinstance(result, int) else 0
    except (streams.StdoutClosedError, BrokenPipeError):
        streams.discard_stdout()
        return 0
    except SystemExit as stop:  # typer exits if the pipe closes while it prints help
        streams.discard_stdout()
        return 0 if isinstance(stop.__context__, BrokenPipeError) else int(stop.code or 0)
    except RankError as error:  # already reported
        return error.exit_status
    except TgenError as error:
        if not isinstance(error, (UsageError, ModelError)) or rank_zero_reports():
            console.print_error(error.message, error.hint)
        return error.exit_status
    except TyperException as error:
        return _report_usage(error, arguments)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        hint = "reinstall tgen: pip install tgen-lm"
        console.print_error(f"the package {error.name} is missing", hint)
        return 1
    except OSError as error:  # a full disk, a directory without write permission
        streams.discard_stdout()
        message = describe_os_error(error, "stdout" if only_prints else "")
        hint = _DISK_HINTS.get(error.errno or 0, "")
        try:
            os.getcwd()
        except OSError:
            message, hint = "the working directory no longer exists", "change to another directory"
        console.print_error(message, hint)
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            console.print_error("out of memory", "choose a smaller model, batch or context")
            return 1
        return _report_bug(error, debug="--debug" in arguments)
    finally:
        console.quiet = False


def _report_usage(error: TyperException, arguments: list[str]) -> int:
    if not arguments:  # help was shown
        return 0
    if rank_zero_reports():
        message = " ".join(error.format_message().split())
        command = next((f"tgen {name}" for name in arguments if name in COMMANDS), "")
        hint = (
            f"run `{command or 'tgen'} --help` to list the {'options' if command else 'commands'}"
        )
        if "extra argument" in message:
            hint = _INSTEAD_OF_ARGUMENTS.get(command, hint)
        console.print_error(message[:1].lower() + message[1:], hint)
    return error.exit_code


def _report_bug(error: Exception, *, debug: bool) -> int:
    import tempfile
    import traceback

    if debug:
        from tgen.cli.rich_console import err

        err.print(traceback.format_exc())
        return 70
    message = f"internal error: {type(error).__name__}: {error}"[:300]
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tgen-", suffix=".log", delete=False) as log:
            traceback.print_exception(error, file=log)
        hint = f"please report it with the traceback in {log.name}"
    except OSError:  # no temporary directory is writable, or the disk is full
        hint = "please report it with the traceback that --debug prints"
    console.print_error(message, hint)
    return 70
