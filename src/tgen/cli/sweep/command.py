"""`tgen sweep`: runs of every combination of values, with a table of their results."""

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tgen.cli import console
from tgen.cli.options import (
    Reader,
    flag_of,
    json_option,
    make_command,
    nested,
    parse_count,
    quiet_option,
    read_option,
    reading_options,
)
from tgen.cli.signals import StopSignal
from tgen.cli.train.command import read_out
from tgen.config.input_files import PANEL, Reading
from tgen.config.option import check_combinations, option
from tgen.config.training import TrainConfig
from tgen.errors import TgenError, UsageError
from tgen.reports.number_format import count
from tgen.reports.sweep import SweepRunReport
from tgen.reports.training import StepReport
from tgen.runs import RunRequest
from tgen.runs.output_folder import default_name
from tgen.storage import files

if TYPE_CHECKING:
    from tgen.experiments.sweep import SweepReport, SweepRequest

PANELS = ("Data and tokenizer", PANEL)
# Options whose values --set can vary, by the field of SweepOptions that has them
_VARIED = dict.fromkeys(("family", "size", "parameters", "tokenizer", "vocab_size", "from"), "run")
_VARIED["lora"] = "config"
_SETTINGS = {"parameters": "size", "from": "start_from"}  # names in a comparison of runs
_NOT_OF_A_SWEEP = {"out", "from_run", "overrides", "overwrite", "parallel", "n_ranks"}
_NOT_OF_A_SWEEP |= {"device_memory", "index", "train", "reading", "command", "began"}
_CORPUS = "Files, directories or glob patterns: texts, documents or rows (text, prompt and "
_CORPUS += "completion, or messages), also compressed."


def parse_values(settings: list[str]) -> dict[str, list[str]]:
    """Parse FIELD=VALUE,VALUE pairs; values with commas are a JSON list.

    Raise UsageError for a pair without `=`, an empty value, an invalid list, and a field that is
    given twice.
    """
    parsed: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        name = name.replace("-", "_")
        hint = "use, for example, --set n_layers=2,4"
        if not equals or not name:
            raise UsageError(f"--set: not FIELD=VALUES (got {setting!r})", hint)
        if name in parsed:
            raise UsageError(f"--set {name} is given twice", "separate its values by commas")
        values: Any = [value.strip() for value in text.split(",")]
        if text.startswith("["):
            try:
                values = [v if isinstance(v, str) else json.dumps(v) for v in json.loads(text)]
            except (ValueError, RecursionError):
                raise UsageError(
                    f"--set {name}: not a JSON list (got {text!r})",
                    f"""use, for example, --set '{name}=["a,b", "c"]'""",
                ) from None
        if not values or not all(values):
            raise UsageError(f"--set {name}: a value is empty (got {text!r})", hint)
        parsed[name] = values
    return parsed


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of `tgen sweep`; `run` and `config` have those that were given."""

    run: dict[str, Any] = nested(
        RunRequest,
        only=[one.name for one in fields(RunRequest) if one.name not in _NOT_OF_A_SWEEP],
        help_texts={"corpus": _CORPUS},
        parameters=Reader(str, partial(parse_count, "--parameters")),
    )
    settings: list[str] = option(
        default_factory=list,
        help_text="Setting of the model or the run, or family, size, parameters, tokenizer, "
        "vocab_size, from or lora, with the values to combine; a JSON list allows commas in them. "
        "Repeatable.",
        flags="--set",
        metavar="FIELD=VALUE,VALUE",
    )
    seeds: int = option(
        1,
        "Number of runs per combination; their seeds count up from --seed.",
        "--seeds",
        low=1,
        high=10_000,
    )
    config: dict[str, Any] = nested(TrainConfig)
    flop: float | None = option(
        None,
        "Floating-point operations to train each run with, for example 1e15.",
        "--flop",
        low=1,
        high=1e24,
        excludes="minutes steps",
        shown_default="as many as --minutes allow",
    )
    halving: bool = option(
        False,
        "Successive halving: train all combinations for a short time, the better half for twice "
        "as long, and so on; the last two take the whole time.",
        "--halving",
    )
    reading: dict[str, Any] = reading_options()
    out: Path | None = option(
        None,
        "Directory of the sweep, with one model directory per run.",
        "--out -o",
        metavar="DIR",
        shown_default="sweeps/<name of the corpus>",
        reader=Reader(str, read_out),
    )
    dry_run: bool = option(False, "Print the plan and exit.", "--dry-run")
    json: bool = json_option("Write every report to stdout, one JSON object per line.")
    quiet: bool = quiet_option()

    def __post_init__(self) -> None:
        if not self.run.get("corpus"):
            raise UsageError("no corpus", "name a text file")
        for path in self.run["corpus"]:
            if path == "-" or files.is_pipe(path):
                hint = f"name a file instead of {path}"
                raise UsageError("a sweep reads its corpus several times", hint)

    def request(self) -> "SweepRequest":
        """Return the sweep; raise UsageError for invalid values."""
        from tgen.experiments.sweep import SweepRequest

        axes = parse_values(self.settings)
        if "seed" in axes:
            hint = "use --seeds N: a run per seed, from --seed on"
            raise UsageError("--set seed: this field has its own option", hint)
        for name in axes.keys() & _VARIED.keys():
            field, flag = "start_from" if name == "from" else name, f"--{name.replace('_', '-')}"
            if field in self.run or field in self.config:
                raise UsageError(f"--set {name} cannot be combined with {flag}", f"remove {flag}")
        cells = []
        for chosen in product(*axes.values()):
            values = dict(zip(axes, chosen, strict=True))
            varied = {name: text for name, text in values.items() if len(axes[name]) > 1}
            cells.append((varied, self._run_request(values)))
        if self.halving and len(cells) < 3:
            raise UsageError(
                f"--halving: no effect on {count(len(cells), 'combination')} (expected 3 or more)",
                "remove it, or add values with --set",
            )
        seed = self.config.get("seed", TrainConfig.seed)
        return SweepRequest(
            out=self.out or Path("sweeps") / default_name(self.run["corpus"][0]),
            cells=cells,
            seeds=[*range(seed, seed + self.seeds)],
            flop=self.flop,
            halving=self.halving,
        )

    def _run_request(self, values: dict[str, str]) -> RunRequest:
        run, config, overrides = dict(self.run), dict(self.config), {}
        for name, text in values.items():
            if name in _VARIED:
                field, value = read_option(SweepOptions, _VARIED[name], name, text)
                (run if _VARIED[name] == "run" else config)[field] = value
            else:
                overrides[name] = text
        given = run.keys() | config.keys()
        declared = (*fields(RunRequest), *fields(TrainConfig))
        named = {one.name: one.metadata for one in declared if one.name in given}
        check_combinations(named, partial(flag_of, SweepOptions))
        return RunRequest(
            **run,
            out=Path(),
            overrides=overrides,
            train=TrainConfig(**config),
            reading=Reading(**self.reading),
            command=[*console.command_words],
        )


def sweep(options: SweepOptions) -> None:
    """Train a model for every combination of values, and compare them.

    All runs have the same time (--minutes), steps or floating-point operations. They are
    interleaved: every combination with the first seed, then with the second one. The plan is
    printed before the first run, and invalid or equal combinations are errors. Ctrl-C saves; the
    same command continues the sweep, also after a crash. Several processes with the same command
    and a shared directory each take the next free run.
    """
    from tgen.cli.sweep.progress import SweepProgress
    from tgen.experiments.sweep import dry_run
    from tgen.experiments.sweep import sweep as run_sweep

    request = options.request()
    if options.json:
        console.require_stdout()
    stop_signal = StopSignal()
    stopped = stop_signal.is_requested
    reports: Generator[SweepReport, None, None] = run_sweep(request, stopped=stopped)
    if options.dry_run:
        reports = dry_run(request)
    try:
        with (
            SweepProgress(json_lines=options.json, plan_only=options.dry_run) as progress,
            closing(reports),
        ):
            for report in reports:
                if isinstance(report, StepReport | SweepRunReport):  # between runs, signals exit
                    stop_signal.is_training = isinstance(report, StepReport)
                progress.show(report)
    finally:
        if stop_signal.number:
            console.print_status("stopped: the same command continues")
    if stop_signal.number:
        raise typer.Exit(128 + stop_signal.number)
    if options.dry_run:
        return
    _show_results(request, options)
    if progress.failures:
        names = ", ".join(sorted(progress.failures)[:5])
        raise TgenError(
            f"{count(len(progress.failures), 'run')} failed: {names}",
            "the same command tries again; training/log.jsonl has the last steps of each",
        )


def _show_results(request: "SweepRequest", options: SweepOptions) -> None:
    """Print the comparison of all runs, with the means of the seeds."""
    from tgen.cli.compare import print_comparison
    from tgen.experiments.comparison import compare_runs
    from tgen.experiments.sweep import run_names

    paths = [request.out / name for cell in run_names(request) for name in cell]
    varied = [_SETTINGS.get(name, name) for name in request.cells[0][0]]
    report = compare_runs(paths, by=varied if len(request.seeds) > 1 else ())
    print_comparison(report, json=options.json)


command = make_command(sweep, SweepOptions, PANELS)
