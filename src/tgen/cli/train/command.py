"""`tgen train`: a plan, then a bar, then a model directory."""

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from tgen import distributed
from tgen.cli import console
from tgen.cli.distributed import all_ranks
from tgen.cli.model_loading import ensure_kernels_compiled
from tgen.cli.options import (
    DeviceMemoryOption,
    DeviceOption,
    QuietOption,
    RanksOption,
    ThreadsOption,
    out_directory,
    parse_settings,
    parse_size,
    was_given,
)
from tgen.cli.signals import StopSignal
from tgen.config import DEFAULT_FAMILY, Family, Parallel, Size, TrainConfig
from tgen.errors import UsageError
from tgen.reports import PreparingReport

_DEFAULT = TrainConfig()
# What a run was made from and writes: this cannot be given again when it is resumed.
_FIXED = (
    "tokenizer",
    "vocab_size",
    "size",
    "family",
    "overwrite",
    "start_from",
    "compiled",
    "tensorboard",
    "ngrams",
    "dry_run",
    "ranks",
    "device_memory",
)
_SETTINGS = ("minutes", "steps", "val_fraction", "seed")  # and this only as it was, or --override
_OPTION = {"start_from": "from", "settings": "set", "compiled": "compile"}
# A model that is fine-tuned brings these with it.
_BROUGHT = ("tokenizer", "vocab_size", "size", "family")


def train(
    context: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CORPUS...",
            show_default=False,
            help="Files, folders, glob patterns, or - for stdin. Any bytes; .jsonl files "
            'hold {"text"} or {"prompt", "completion"} rows.',
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            show_default="models/<name of the corpus>",
            help="Model directory to write.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", help="How long to train.")
    ] = _DEFAULT.minutes,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            show_default="as many as the minutes allow",
            help="Train this many steps instead.",
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="NAME",
            show_default=False,
            help="Fine-tune this model, a path or a name: its tokenizer, its shape, its weights.",
        ),
    ] = None,
    size: Annotated[
        Size | None,
        typer.Option("--size", show_default="chosen by the plan", help="How large a model."),
    ] = None,
    family: Annotated[
        Family,
        typer.Option("--family", help="Which architecture."),
    ] = DEFAULT_FAMILY,
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            metavar="char|bpe|PATH",
            show_default="bpe; char below 10 KB",
            help="What a token is, or a tokenizer.json to use.",
        ),
    ] = "auto",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            show_default="all characters; chosen by the plan for bpe",
            help="At most this many tokens.",
        ),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option("--val-fraction", help="The last part of the text, held out.")
    ] = _DEFAULT.val_fraction,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            show_default=False,
            help="Any other field of the model or the run; repeatable.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Repeats a run given in --steps.")
    ] = _DEFAULT.seed,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")
    ] = False,
    ranks: RanksOption = None,
    device_memory: DeviceMemoryOption = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            show_default="on a GPU with Triton",
            help="Compile the training step: slower to begin, faster then.",
        ),
    ] = None,
    parallel: Annotated[
        Parallel | None,
        typer.Option(
            "--parallel",
            show_default="ddp where a rank has the memory",
            help="How processes that torchrun started share the model: copies (ddp) or parts "
            "(fsdp).",
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard events to DIR/training/tensorboard."),
    ] = False,
    ngrams: Annotated[
        bool,
        typer.Option(
            "--ngrams",
            help="Keep n-grams of the text beside the weights: `generate --draft` guesses better.",
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="With --resume: another corpus, --minutes, --steps, --seed or --set than the "
            "run's own.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in --out.")
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Write every report as a line of JSON to stdout.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Train a model on your text.

    Writes a directory that `tgen generate` and transformers load, with the weights that predict the
    held-out text best. Ctrl-C saves and prints the command that goes on.
    """
    caught = StopSignal()
    context.call_on_close(caught.explain)
    began = time.monotonic() - time.process_time()  # Python's own start counts too
    if json_output:
        console.require_stdout()
    paths = corpus or []
    target = out_directory(out, paths)
    from tgen import runs
    from tgen.cli.train.progress import TrainingProgress

    if resume:
        given = [name for name in _FIXED if was_given(context, name)]
        if given:
            raise UsageError(
                f"--resume does not go with --{_OPTION.get(given[0], given[0]).replace('_', '-')}",
                "it goes on as it began: leave it away, or begin a new run with another --out",
            )
        values = {"minutes": minutes, "steps": steps, "val_fraction": val_fraction, "seed": seed}
        asked = runs.ResumeRequest(
            out=target,
            corpus=paths,
            settings={name: values[name] for name in _SETTINGS if was_given(context, name)},
            overrides=parse_settings(settings or []),
            override=override,
            parallel=parallel,
            device=device,
            threads=threads,
        )
        reports = runs.resume(asked, stopped=caught.any)
    else:
        if override:
            raise UsageError("--override goes with --resume", "add it, or leave --override away")
        if not paths:
            raise UsageError("there is no corpus", "name a file of text, or `-` for stdin")
        _check_together(context, start_from, dry_run=dry_run)
        config = TrainConfig(minutes=minutes, steps=steps, val_fraction=val_fraction, seed=seed)
        request = runs.RunRequest(
            corpus=paths,
            out=target,
            start_from=start_from,
            family=family,
            size=size,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            train=config,
            overrides=parse_settings(settings or []),
            compile=compiled,
            parallel=parallel,
            overwrite=overwrite,
            device=device,
            threads=threads,
            tensorboard=tensorboard,
            ngrams=ngrams,
            n_ranks=ranks,
            device_memory=parse_size("--device-memory", device_memory),
            began=began,
        )
        reports = (
            (runs.dry_run(asked) for asked in [request])
            if dry_run
            else runs.start(request, stopped=caught.any)
        )
    with (
        all_ranks(paths, quiet=quiet) as shows,
        TrainingProgress(quiet=quiet or not shows, json_lines=json_output and shows) as view,
    ):
        for report in reports:
            if not isinstance(report, PreparingReport):
                caught.running = caught.begun = True  # there is something to save
            view.show(report)
        number = max(distributed.all_gather(caught.number))  # all end as the one that was told to
    if number:
        raise typer.Exit(128 + number)
    if not dry_run and distributed.ranks().local_rank == 0:
        caught.running = False
        with contextlib.suppress(Exception):  # what fails here is said when a text is wanted
            ensure_kernels_compiled(
                device, quiet=quiet or not shows
            )  # so that the first text comes at once


def _check_together(context: typer.Context, start_from: Path | None, *, dry_run: bool) -> None:
    if was_given(context, "minutes") and was_given(context, "steps"):
        raise UsageError("--minutes does not go with --steps", "give one of them")
    for name in ("ranks", "device_memory"):
        if was_given(context, name) and not dry_run:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} goes with --dry-run", "torchrun starts a run on many ranks")
    for name in _BROUGHT:
        if start_from is not None and was_given(context, name):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} does not go with --from", "the model brings its own")
