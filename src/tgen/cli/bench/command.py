"""`tgen bench`: how fast the model is here, what the KV cache buys, and what a change did."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from tgen.cli import console
from tgen.cli.bench.options import ENGINES, BenchOptions
from tgen.cli.model_loading import ensure_kernels_compiled
from tgen.cli.options import DeviceOption, JsonOption, ModelOption, QuietOption, option
from tgen.cli.ranges import parse_sizes
from tgen.config import SamplingConfig, StoredAs
from tgen.errors import UsageError

Output = Literal["table", "md", "csv", "json", "jsonl"]
Peer = Literal["self", "transformers", "llama.cpp"]
_TESTS, _STUDIES, _SWEEPS = "What is timed", "In place of that", "Each combination of"
_COMPARING = "Compared with"


def _list(name: str, help_text: str, panel: str, default: str, metavar: str) -> Any:
    return option(name, help_text, panel, metavar=metavar, show_default=default)


def bench(
    n_prompt: Annotated[
        list[str] | None,
        _list("--n-prompt -p", "Prompts of so many tokens.", _TESTS, "512, or what fits", "N,..."),
    ] = None,
    n_gen: Annotated[
        list[str] | None,
        _list("--n-gen -n", "So many tokens one by one.", _TESTS, "128, or what fits", "N,..."),
    ] = None,
    pg: Annotated[
        list[str] | None,
        _list("--pg", "A prompt, and tokens after it.", _TESTS, "none", "P,N"),
    ] = None,
    depth: Annotated[
        list[str] | None,
        _list("--n-depth -d", "After so many tokens that are there.", _TESTS, "0", "N,..."),
    ] = None,
    trials: Annotated[int, option("--trials -r", "Rounds.", _TESTS, min=1, max=1000)] = 10,
    seed: Annotated[
        int, option("--seed", "Of the tokens that are read.", _TESTS, min=0)
    ] = SamplingConfig().seed,
    limits: Annotated[
        bool,
        option("--limits/--no-limits", "Measure what the machine could give.", _TESTS),
    ] = True,
    engine: Annotated[
        list[str] | None, _list("--engine", "kernels, torch.", _SWEEPS, "the fastest", "NAME,...")
    ] = None,
    weights: Annotated[
        list[str] | None,
        _list("--weights", "float32, bfloat16, int8.", _SWEEPS, "as they are stored", "TYPE,..."),
    ] = None,
    threads: Annotated[
        list[str] | None, _list("--threads -t", "Threads.", _SWEEPS, "all cores", "N,...")
    ] = None,
    batch: Annotated[
        list[str] | None,
        _list("--batch", "Rows computed together.", _SWEEPS, "1", "N,..."),
    ] = None,
    kv_cache: Annotated[
        bool, option("--kv-cache", "With and without the cache, by length.", _STUDIES)
    ] = False,
    length: Annotated[
        list[str] | None,
        _list("--length -l", "Of its texts.", _STUDIES, "16 and its doublings", "N,..."),
    ] = None,
    train: Annotated[bool, option("--train", "A step of training.", _STUDIES)] = False,
    end_to_end: Annotated[
        bool, option("--end-to-end", "A whole process, phase by phase.", _STUDIES)
    ] = False,
    against: Annotated[
        Peer | None, option("--against", "The same weights elsewhere, in turns.", _COMPARING)
    ] = None,
    compare: Annotated[
        Path | None,
        option(
            "--compare", "An earlier run, saved as JSON: its tests.", _COMPARING, metavar="FILE"
        ),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        option(
            "--fail-if-slower",
            "Exit with 1 where --compare is sure of it.",
            _COMPARING,
            metavar="PERCENT",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Keep the figures as JSON, for --compare."),
    ] = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="md, csv, json and jsonl are llama-bench's.")
    ] = "table",
    model: ModelOption = None,
    json_output: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Measure how fast the model is on this machine, in llama-bench's terms.

    pp512 reads a prompt of 512 tokens, tg128 takes 128 one by one, @ d4096 after 4096 others. Lists
    (128,256) and ranges (64-256+64, 64-512*2) are measured in every combination, in turns.
    """
    studying = {"--kv-cache": kv_cache, "--train": train, "--end-to-end": end_to_end}
    comparing = {"--against": against is not None, "--compare": compare is not None}
    chosen = [name for name, given in (studying | comparing).items() if given]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other", "choose one")
    study = next((name for name in chosen if studying.get(name)), None)
    given = {
        "--n-prompt": n_prompt, "--n-gen": n_gen, "--pg": pg, "--n-depth": depth, "--batch": batch,
        "--engine": engine, "--save": save, "--weights": weights if train else None,
    }  # fmt: skip
    refused = [name for name, value in given.items() if value and study]
    allowed = {"--end-to-end": ("--n-prompt", "--n-gen"), "--train": ("--batch",)}
    refused = [name for name in refused if name not in allowed.get(study or "", ())]
    if refused:
        raise UsageError(f"{refused[0]} changes nothing with {study}", "leave it away")
    if length and study != "--kv-cache":
        raise UsageError("--length is for --kv-cache", "-p and -n are lengths of tests")
    if fail_if_slower and compare is None:
        raise UsageError("--fail-if-slower needs an earlier run", "name it: --compare FILE")
    if json_output and output not in ("table", "json"):
        raise UsageError(f"--json and -o {output} exclude each other", "choose one")
    if (study or against) and output not in ("table", "json"):
        raise UsageError(f"-o {output} is of throughput alone", "--json has every number")

    if save and (save.is_dir() or not save.parent.is_dir()):
        raise UsageError(f"--save {save} is no place for a file", "name a file in a folder")

    from tgen.checkpoint.model_lookup import find_model

    path = find_model(model).path
    asked = BenchOptions(
        path=path,
        device=device,
        trials=trials,
        seed=seed,
        engines=_names("--engine", engine, ENGINES),
        weights=_names("--weights", weights, get_args(StoredAs)),
        threads=_counts("--threads", threads),
        batches=_counts("--batch", batch),
        prompts=_counts("--n-prompt", n_prompt),
        gens=_counts("--n-gen", n_gen),
        pairs=[_pair(one) for one in pg] if pg else None,
        depths=_counts("--n-depth", depth),
        lengths=_counts("--length", length),
        limits=limits,
        output="json" if json_output else output,
        save=save,
        quiet=quiet,
    )
    ensure_kernels_compiled(device, quiet=quiet)
    console.print_status(f"{path}", quiet=quiet)
    if study:
        from tgen.cli.bench import other_modes

        run = (
            other_modes.kv_cache
            if kv_cache
            else other_modes.train
            if train
            else other_modes.end_to_end
        )
        run(asked)
        return
    from tgen.cli.bench import throughput

    if against:
        throughput.against(asked, against)
    elif compare:
        throughput.compare(asked, compare, _share(fail_if_slower))
    else:
        throughput.throughput(asked)


def _counts(option: str, given: list[str] | None) -> list[int] | None:
    return None if given is None else parse_sizes(option, given)


def _names(option: str, given: list[str] | None, known: tuple[str, ...]) -> list[Any] | None:
    names = [name.strip() for one in given or [] for name in one.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r} is not known", f"choose of {', '.join(known)}")
    return list(dict.fromkeys(names)) or None


def _pair(spec: str) -> tuple[int, int]:
    parts = [part.strip() for part in spec.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"--pg {spec!r} is no pair", "for example --pg 512,128")
    return int(parts[0]), int(parts[1])


def _share(percent: str | None) -> float | None:
    """`5%` or `5` -> 0.05."""
    if percent is None:
        return None
    try:
        share = float(percent.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--fail-if-slower {percent!r} is no share", "for example 5%")
    return share
