"""`tgen models`: list the models that can be found by name, and remove some."""

import sys
from pathlib import Path

import typer

from tgen.cli import console
from tgen.cli.models.options import ModelsOptions
from tgen.cli.options import make_command
from tgen.errors import UsageError
from tgen.reports.number_format import format_bytes


def models(options: ModelsOptions) -> None:
    """List the models that --model finds by name, or remove some.

    The list has the models in ./models and the data directory, the shipped model, and those in the
    caches of transformers, LM Studio, llama.cpp and Ollama: family, parameters, data type, context
    length in tokens, size on disk with the training state, and when the weights were written.

    rm removes a model's directory with its training state, or its GGUF file, after a question. It
    refuses directories that are not models, links, models of other programs, and runs in progress.
    Files in the directory that do not belong to a model stay.

    The weights that the CPU kernels use are cached in the layout of the kernels. --clear-cache
    removes these files. --check compares them with their checksums, which opening a model does not,
    and removes damaged ones; the exit status is then 1.
    """
    if options.check:
        _check_cache(options)
        return
    if options.clear_cache:
        from tgen.engine.weights_cache import clear

        shown = _describe_cache()
        clear()
        message = f"removed {shown}" if shown else "the cache is empty"
        console.print_status(message, quiet=options.quiet)
        return
    if options.action == "rm":
        for name in options.names:
            _remove(name, options)
        return
    from tgen.cli.models.listing import describe_models
    from tgen.cli.models.output import print_json, print_table

    reports = list(describe_models())
    if options.json:
        print_json(reports)
    else:
        print_table(reports, quiet=options.quiet)
        if shown := _describe_cache():
            console.print_status(shown, quiet=options.quiet)


def _describe_cache() -> str:
    """Return the number, the size and the directory of the cached weights; "" without any."""
    from tgen.engine.weights_cache import cached_files

    sizes = cached_files()
    noun, folders = "file" if len(sizes) == 1 else "files", {path.parent for path in sizes}
    size = format_bytes(sum(sizes.values()))
    return "".join(f"cached weights: {len(sizes)} {noun}, {size}, in {one}" for one in folders)


def _check_cache(options: ModelsOptions) -> None:
    """Compare the cached weights with their checksums."""
    from tgen.engine.weights_cache import check

    results = dict(check())
    damaged = [path for path, intact in results.items() if not intact]
    for path in damaged:
        console.print_status(f"warning: {path} was damaged and has been removed")
    n = len(results) - len(damaged)
    console.print_status(f"cached weights: {n} intact, {len(damaged)} damaged", quiet=options.quiet)
    if damaged:
        raise typer.Exit(1)


def _remove(name: str, options: ModelsOptions) -> None:
    """Remove one model, after a question unless --yes is given."""
    from tgen.checkpoint.model_lookup import DATA, LOCAL, SHIPPED, find_model
    from tgen.cli.models.listing import describe_model
    from tgen.cli.models.output import kind
    from tgen.runs.removal import check_removable, remove_model

    path, found_by = find_model(name)
    if found_by not in (LOCAL, DATA, SHIPPED, "a path"):
        raise UsageError(
            f"{name} belongs to {found_by}", "remove it with the program that downloaded it"
        )
    if found_by == "a path" and path.is_file() and Path(name).is_dir():
        raise UsageError(f"{name} is not a model", f"name its GGUF file: {path}")
    check_removable(path)
    if not options.yes:
        report = describe_model(path, name=name, found_by=found_by, is_default=False)
        details = [kind(report), _parameters(report.n_parameters)]
        shown = ", ".join([*filter(None, details), format_bytes(report.n_bytes)])
        _ask(path, shown)
    others = remove_model(path)
    console.print_status(f"removed {path}", quiet=options.quiet)
    if others:
        names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        console.print_status(f"other files stay in {path}: {names}", quiet=options.quiet)


def _parameters(n: int | None) -> str:
    return "" if n is None else f"{n:,} parameters"


def _ask(path: Path, details: str) -> None:
    """Ask on the terminal; end the command unless the answer is yes."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"removing {path} needs an answer", "add --yes to remove it without one")
    console.ask(f"remove {path} ({details})? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        console.print_status("not removed")
        raise typer.Exit(1)


command = make_command(models, ModelsOptions)
