"""The options of `tgen bench`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

from tgen.cli.options import (
    Reader,
    adapter_option,
    flag_of,
    json_option,
    model_option,
    quiet_option,
)
from tgen.config import CacheDtype, Device, EngineOptions, StoredAs
from tgen.config.engine import device_option
from tgen.config.option import MAX_THREADS, option
from tgen.errors import UsageError

Output = Literal["table", "md", "csv", "json", "jsonl"]
OtherEngine = Literal["self", "transformers", "llama.cpp"]
ENGINES = ("kernels", "torch")
_SWEEP, _MODES, _COMPARISON = "Sweep (every combination)", "Other measurements", "Comparison"
_compare, _mode = partial(option, panel=_COMPARISON), partial(option, panel=_MODES)
_LLAMA_BENCH = "output=md output=csv output=jsonl"  # only for throughput
_THROUGHPUT = f"pairs depths engines save against baseline {_LLAMA_BENCH}"
_SIZES = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")
_MAX_VALUES = 10_000  # per range


def parse_sizes(flag: str, specs: Sequence[str]) -> list[int]:
    """Parse `512`, `128,256`, `16-64+16` (16, 32, 48, 64) and `16-64*2` (16, 32, 64).

    Returns each value once. Raises UsageError for anything else.
    """
    sizes: list[int] = []
    for part in (part.strip() for spec in specs for part in spec.split(",")):
        match = _SIZES.fullmatch(part)
        if match is None:
            hint = f"use, for example, {flag} 512, 128,256, 64-256+64 or 64-512*2"
            raise UsageError(f"{flag}: not a number or range (got {part!r})", hint)
        first, last, by = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
        geometric = match[3] == "*"
        too_many = (last - first) // by > _MAX_VALUES if by else True
        if last < first or by < 1 + geometric or (geometric and not first) or too_many:
            hint = f"use, for example, {flag} 64-512*2"
            raise UsageError(f"{flag}: not a range (got {part})", hint)
        while first <= last:
            sizes.append(first)
            first = first * by if geometric else first + by
    return list(dict.fromkeys(sizes))


def _read_threads(flag: str, texts: list[str]) -> list[int]:
    counts = parse_sizes(flag, texts)
    if wrong := [n for n in counts if not 1 <= n <= MAX_THREADS]:
        hint = f"set {flag} to a number from 1 to {MAX_THREADS:,}"
        raise UsageError(f"{flag}: invalid value {wrong[0]}", hint)
    return counts


def _read_names(known: tuple[str, ...], flag: str, values: list[str]) -> list[str]:
    names = [name.strip() for value in values for name in value.split(",")]
    for name in names:
        if name not in known:
            message, hint = f"{flag}: unknown value {name!r}", f"choose from {', '.join(known)}"
            raise UsageError(message, hint)
    return list(dict.fromkeys(names))


def _list_option(
    help_text: str,
    flags: str,
    default: str,
    read: Callable[[str, list[str]], list[Any]] = parse_sizes,
    **more: Any,
) -> Any:
    reader = Reader(list[str], partial(read, flags.split()[0]))
    details = {"metavar": "N,...", "shown_default": default, "reader": reader}
    return option(None, help_text, flags, **details | more)


def _read_pair(text: str) -> tuple[int, int]:
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) != 2 or not all(one.isdecimal() and len(one) < 10 for one in numbers):
        raise UsageError(f"--pg: not P,N (got {text!r})", "use, for example, --pg 512,128")
    return int(numbers[0]), int(numbers[1])


def _read_percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100:
        hint = "use, for example, --fail-if-slower 5%"
        raise UsageError(f"--fail-if-slower: not a percentage (got {text!r})", hint)
    return percent / 100


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `tgen bench`; None lets the measurement choose."""

    model: str | None = model_option()
    adapter: str | None = adapter_option()
    prompts: list[int] | None = _list_option(
        "Prompt lengths to prefill, in tokens.", "--n-prompt -p", "512, or as many as fit"
    )
    gens: list[int] | None = _list_option(
        "Numbers of tokens to decode one by one.", "--n-gen -n", "128, or as many as fit"
    )
    depths: list[int] | None = _list_option(
        "Context depths: tokens already in the KV cache.", "--n-depth -d", "0"
    )
    pairs: list[tuple[int, int]] | None = option(
        None,
        "Test that prefills P tokens and then decodes N tokens; repeatable.",
        "--pg",
        metavar="P,N",
        shown_default="",
        reader=Reader(list[str], lambda values: [_read_pair(value) for value in values]),
    )
    trials: int = option(10, "Number of trials per test.", "--trials -r", low=1, high=1000)
    device: Device = device_option()
    engines: list[Any] | None = _list_option(
        "Engines: kernels, torch.",
        "--engine",
        "the fastest",
        partial(_read_names, ENGINES),
        panel=_SWEEP,
        metavar="NAME,...",
    )
    dtypes: list[Any] | None = _list_option(
        "Data types of the weights: float32, float16, bfloat16, int8, int4.",
        "--dtype",
        "as stored",
        partial(_read_names, get_args(StoredAs)),
        panel=_SWEEP,
        metavar="TYPE,...",
    )
    cache_dtype: CacheDtype | None = option(
        None,
        "Data type of the KV cache, on a CPU.",
        "--cache-dtype",
        shown_default="float32 with float32 weights, else float16",
        panel=_SWEEP,
    )
    threads: list[int] | None = _list_option(
        "Numbers of CPU threads.", "--threads -t", "all cores", _read_threads, panel=_SWEEP
    )
    batches: list[int] | None = _list_option(
        "Numbers of sequences per batch.", "--batch", "1", panel=_SWEEP
    )
    seed: int = option(0, "Random seed of the input tokens.", "--seed", low=0)
    save: Path | None = _compare(
        None, "Save the results as JSON, for --compare.", "--save", metavar="FILE"
    )
    baseline: Path | None = _compare(
        None,
        "Repeat the tests of a file that --save wrote, by default on the same model, and compare.",
        "--compare",
        metavar="FILE",
    )
    fail_if_slower: float | None = _compare(
        None,
        "Exit with status 1 if slower than --compare by more than this percentage (significant at "
        "99%).",
        "--fail-if-slower",
        metavar="PERCENT",
        needs="baseline",
        reader=Reader(str, _read_percent),
    )
    against: OtherEngine | None = _compare(
        None,
        "Compare with another engine on the same weights: self, transformers or llama.cpp.",
        "--against",
        metavar="ENGINE",
        excludes=f"baseline {_LLAMA_BENCH}",
    )
    kv_cache: bool = _mode(
        False,
        "Measure decoding with and without the KV cache, by text length.",
        "--kv-cache",
        excludes=f"train end_to_end prompts gens batches {_THROUGHPUT}",
    )
    lengths: list[int] | None = _list_option(
        "Text lengths for --kv-cache, in tokens.",
        "--length -l",
        "powers of two from 16",
        panel=_MODES,
        needs="kv_cache",
        needs_hint="set the lengths of tests with -p and -n",
    )
    train: bool = _mode(
        False,
        "Measure a training step.",
        "--train",
        excludes=f"end_to_end prompts gens dtypes cache_dtype {_THROUGHPUT}",
    )
    end_to_end: bool = _mode(
        False,
        "Measure a whole `tgen generate` process, by phase.",
        "--end-to-end",
        excludes=f"batches {_THROUGHPUT}",
    )
    limits: bool = option(
        True,
        "Do not measure the machine's peak rates (% of peak).",
        "--no-limits",
        panel="Output",
        reader=Reader(bool, lambda given: not given),
    )
    output: Output = option(
        "table",
        "Output format; md, csv, json and jsonl have llama-bench's fields.",
        "--output -o",
        panel="Output",
    )
    json_output: bool = json_option("Same as --output json.", excludes=_LLAMA_BENCH)
    quiet: bool = quiet_option()

    @cached_property
    def path(self) -> Path:
        """The model's path."""
        from tgen.cli.model_loading import find_paths

        path, adapter = find_paths(self.model, self.adapter)
        if adapter is None:
            return path
        from tgen.lora.adapter_base import find_base

        if find_base(adapter).resolve() != path.resolve():
            raise UsageError(
                f"--adapter {adapter}: its base is not {path}", "remove --model: speeds are equal"
            )
        return adapter

    @property
    def engine_options(self) -> EngineOptions:
        """The settings of one engine. Raises UsageError for several."""
        return EngineOptions(
            device=self.device,
            threads=self.only("threads", None),
            dtype=self.only("dtypes", None),
            cache_dtype=self.cache_dtype,
        )

    @property
    def names_tests(self) -> bool:
        """Whether the options say which tests to run."""
        tests = (self.prompts, self.gens, self.pairs, self.depths, self.batches)
        return any(one is not None for one in tests)

    def only(self, name: str, default: Any) -> Any:
        """Return the single value of a list. Raises UsageError for several."""
        values = getattr(self, name) or [default]
        if len(values) > 1:
            message = f"{flag_of(BenchOptions, name)}: got {len(values)} values, expected one"
            raise UsageError(message, "pass a single value")
        return values[0]
