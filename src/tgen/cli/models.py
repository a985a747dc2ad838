"""`tgen models`: list the models that can be found by name, and remove some.

The descriptions come from the models' files; weights are not read.
"""

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import typer

from tgen.cli import console
from tgen.cli.json_output import json_line
from tgen.cli.options import json_option, make_command, quiet_option
from tgen.config.option import option
from tgen.drawing.terminal_text import one_line
from tgen.errors import TgenError, UsageError
from tgen.reports.number_format import count, format_bytes

_SCHEMA = "tgen.models/1"


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """The options of `tgen models`."""

    action: Literal["list", "rm"] = option(
        "list",
        "list: show all models that can be found by name. rm: remove models.",
        argument=True,
        metavar="list|rm",
    )
    names: list[str] = option(
        default_factory=list,
        help_text="Models to remove: names in ./models or the data directory, or paths.",
        argument=True,
        metavar="NAME",
    )
    yes: bool = option(
        False,
        "Remove without asking.",
        "--yes -y",
        needs="action=rm",
        needs_hint="remove --yes, or run: tgen models rm NAME --yes",
    )
    check: bool = option(
        False,
        "Compare the cached weights with their checksums, and remove damaged files.",
        "--check",
        excludes="json action=rm",
    )
    clear_cache: bool = option(
        False, "Remove the cached weights.", "--clear-cache", excludes="check json action=rm"
    )
    json: bool = json_option("Write the list as one JSON object.", panel="", excludes="action=rm")
    quiet: bool = quiet_option(panel="")

    def __post_init__(self) -> None:
        if self.action == "rm":
            if not self.names:
                raise UsageError("no model to remove", "name it: tgen models rm NAME")
        elif self.names:
            raise UsageError(
                f"tgen models list takes no name (got {self.names[0]!r})",
                "remove it; tgen inspect --view model describes a model",
            )


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A model as its files describe it; weights are not read."""

    name: str
    path: str
    found_by: str  # where it was found, see `checkpoint.model_lookup`
    is_default: bool  # whether it is the one that commands use without a name
    adapter_of: str | None = None  # the base model that an adapter names; None: not an adapter
    rank: int | None = None  # of an adapter
    family: str | None = None  # for an adapter, the base's; from here on None: see `problem`
    n_parameters: int | None = None
    dtype: str | None = None  # of most of the weights
    context_length: int | None = None
    n_bytes: int  # of all its files on disk
    modified: float | None  # when the weights were written, in seconds since 1970
    problem: str = ""  # why it cannot be loaded; "" if nothing is known


def describe_models() -> Iterator[ModelReport]:
    """Yield each model in the order of the search; one that cannot be loaded, with the reason."""
    from tgen.checkpoint.model_lookup import find_model, list_models

    try:
        default: Path | None = find_model(None).path.resolve()
    except TgenError:  # ./models cannot be read
        default = None
    for name, (path, found_by) in list_models().items():
        yield describe_model(
            path, name=name, found_by=found_by, is_default=path.resolve() == default
        )


def describe_model(path: Path, *, name: str, found_by: str, is_default: bool) -> ModelReport:
    """Describe a model directory, an adapter or a GGUF file."""
    from tgen.checkpoint import model_dir
    from tgen.checkpoint.stored_models import is_adapter
    from tgen.lora import adapter, adapter_base

    facts: dict[str, Any] = {}
    try:
        if is_adapter(path):
            facts["adapter_of"], facts["rank"], counts = adapter.describe(path)
            config, _ = model_dir.describe(adapter_base.find_base(path))
        else:
            config, counts = model_dir.describe(path)
        facts |= {"family": config.family, "context_length": config.context_length}
        facts |= {"n_parameters": counts.total(), "dtype": max(counts, key=counts.__getitem__)}
    except TgenError as error:
        facts["problem"] = error.message
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    return ModelReport(
        name=name,
        path=str(path),
        found_by=found_by,
        is_default=is_default,
        n_bytes=sum(status.st_size for status in _files(path).values()),
        modified=_modified(path),
        **facts,
    )


def _modified(path: Path) -> float | None:
    """Return when the weights were written, as for the choice of the default model; of a model
    without weights, the time of its newest file."""
    from tgen.checkpoint.model_lookup import weights_time

    times = (status.st_mtime for status in _files(path).values())
    return weights_time(path) or max(times, default=None)


def _files(path: Path) -> dict[str, os.stat_result]:
    """Return the status of all files of a model, its training state included, by path.

    Links to files count as the files: cached models consist of links.
    """
    from tgen.checkpoint.stored_models import gguf_parts

    if not path.is_dir():
        paths = [str(part) for part in gguf_parts(path)]
    else:
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    found = {}
    for one in paths:
        with suppress(OSError):  # a broken link, or removed meanwhile
            found[one] = os.stat(one)
    return {name: status for name, status in found.items() if stat.S_ISREG(status.st_mode)}


def models(options: ModelsOptions) -> None:
    """List the models that --model finds by name, or remove some.

    The list has the models in ./models and the data directory, the shipped model, and those in the
    caches of transformers, LM Studio, llama.cpp and Ollama. It shows their family, parameters, data
    type, context length in tokens, size on disk with the training state, and when the weights were
    written.

    rm removes a model's directory with its training state, or its GGUF file. It asks first. It does
    not remove a model that is named by a link, the shipped model, models of other programs, runs in
    progress, or directories that are not models. Files in the directory that do not belong to a
    model stay.

    The weights that the CPU kernels use are cached in files, in the layout of the kernels.
    --clear-cache removes these files. --check compares them with their checksums, which opening a
    model does not do. If it finds damaged files, it removes them and exits with status 1.
    """
    if options.check:
        _check_cache()
        return
    if options.clear_cache:
        from tgen.engine.weights_cache import clear

        shown = _describe_cache()
        clear()
        console.print_status(f"removed {shown}" if shown else "the cache is empty")
        return
    if options.action == "rm":
        for name in options.names:
            _remove(name, options)
        return

    reports = list(describe_models())
    if options.json:
        _print_json(reports)
    else:
        _print_table(reports)
        if shown := _describe_cache():
            console.print_status(shown)


def _describe_cache() -> str:
    """Return the number, the size and the directory of the cached weights; "" without any."""
    from tgen.engine.weights_cache import cached_files

    sizes = cached_files()
    amount = f"{count(len(sizes), 'file')}, {format_bytes(sum(sizes.values()))}"
    return "".join(f"cached weights: {amount}, in {one}" for one in {p.parent for p in sizes})


def _check_cache() -> None:
    """Compare the cached weights with their checksums."""
    from tgen.engine.weights_cache import check

    results = dict(check())
    damaged = [path for path, intact in results.items() if not intact]
    for path in damaged:
        console.print_line(f"warning: {path} was damaged and has been removed")
    n = len(results) - len(damaged)
    console.print_status(f"cached weights: {n} intact, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(1)


def _remove(name: str, options: ModelsOptions) -> None:
    """Remove one model, after a question unless --yes is given."""
    from tgen.checkpoint.model_lookup import (
        CHECKPOINT,
        DATA,
        LOCAL,
        PATH,
        SHIPPED,
        WEIGHTS_DIRECTORY,
        find_model,
    )
    from tgen.runs.remove_model import check_removable, remove_model

    path, found_by = find_model(name)
    if found_by in (CHECKPOINT, WEIGHTS_DIRECTORY):
        raise UsageError(f"{name} is not a model itself", f"name its directory: {path}")
    if found_by not in (LOCAL, DATA, SHIPPED, PATH):
        raise UsageError(
            f"{name} belongs to {found_by}", "remove it with the program that downloaded it"
        )
    if found_by == PATH and path.is_file() and Path(name).is_dir():
        raise UsageError(f"{name} is not a model", f"name its GGUF file: {path}")
    check_removable(path)
    if not options.yes:
        report = describe_model(path, name=name, found_by=found_by, is_default=False)
        n = report.n_parameters
        details = [_kind(report), "" if n is None else f"{n:,} parameters"]
        _ask(path, ", ".join([*filter(None, details), format_bytes(report.n_bytes)]))
    others = remove_model(path)
    console.print_status(f"removed {path}")
    if others:
        names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        console.print_status(f"other files stay in {path}: {names}")


def _ask(path: Path, details: str) -> None:
    """Ask on the terminal; end the command unless the answer is yes."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"removing {path} needs an answer", "add --yes to remove it without one")
    console.ask(f"remove {path} ({details})? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        console.print_line("not removed")
        raise typer.Exit(1)


_HIDDEN_FIRST = (">written", "found in", "dtype", ">context", "family")  # on a narrow terminal


def _print_table(reports: Sequence[ModelReport]) -> None:
    """Print one row per model to stdout, and problems to stderr."""
    from rich.text import Text

    from tgen.cli.rich_console import out, wide
    from tgen.drawing.tables import table

    columns: dict[str, list[Text | str]] = {
        "name": [Text(one.name, style="bold" if one.is_default else "") for one in reports],
        "family": [Text(_kind(one) or "–") for one in reports],
        ">parameters": [_number(one.n_parameters) for one in reports],
        "dtype": [one.dtype or "–" for one in reports],
        ">context": [_number(one.context_length) for one in reports],
        ">size": [format_bytes(one.n_bytes) for one in reports],
        ">written": [
            "–" if t is None else _local_time(t) for t in (one.modified for one in reports)
        ],
        "found in": [Text(one.found_by) for one in reports],
    }
    hidden: list[str] = []
    while True:
        rows = table(*columns)
        for cells in zip(*columns.values(), strict=True):
            rows.add_row(*cells)
        fits = not out.is_terminal or wide.measure(rows).maximum <= out.width
        if fits or len(hidden) == len(_HIDDEN_FIRST):
            break
        hidden.append(_HIDDEN_FIRST[len(hidden)])
        del columns[hidden[-1]]
    console.show(rows, wrap=out.is_terminal)  # only a terminal has a width
    if hidden:
        names = ", ".join(name.lstrip(">") for name in hidden)
        console.print_status(f"not shown at this width: {names}; --json has all")
    for report in reports:
        if report.is_default:
            console.print_status(f"default: {report.name}")
        if report.problem:
            console.print_status(f"warning: {report.name}: {report.problem}")


def _print_json(reports: Sequence[ModelReport]) -> None:
    rows = []
    for report in reports:
        row = asdict(report) | {"problem": report.problem or None}
        if report.modified is not None:
            time = datetime.fromtimestamp(report.modified, UTC)
            row["modified"] = time.isoformat(timespec="seconds")
        rows.append(row)
    console.write(json_line({"schema": _SCHEMA, "models": rows}))


def _kind(report: ModelReport) -> str:
    """Return the family of a model, or the base and rank of an adapter; "" if unknown."""
    if report.adapter_of is None:
        return report.family or ""
    rank = "" if report.rank is None else f", rank {report.rank}"
    return one_line(f"adapter of {report.adapter_of}{rank}")


def _number(n: int | None) -> str:
    return "–" if n is None else f"{n:,}"


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


command = make_command(models, ModelsOptions)
