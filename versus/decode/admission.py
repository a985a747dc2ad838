"""Measure what a new prompt costs beside sequences that are being generated.

    python -m versus.decode.admission

Continuous batching appends a prompt of N tokens to one sequence in the call that appends one token
to each of the others. Its time is compared with the time of the prompt alone, and of the one-token
step alone. The last case appends prompts of many lengths at once. All cases are interleaved.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineKind, EngineOptions
from tgen.engine.base import Engine, reset
from tgen.engine.open_engine import open_engine
from versus import harness

_CACHED = 3  # tokens of each sequence before the call


def time_call(engine: Engine, counts: Sequence[int]) -> float:
    """Return the milliseconds of one `extend` with these numbers of new tokens."""
    reset(engine, len(counts))
    engine.extend([[1] * _CACHED] * len(counts))
    start = time.perf_counter()
    engine.extend([[5] * n for n in counts])
    return 1e3 * (time.perf_counter() - start)


def make_cases(n_rows: int, n_tokens: int) -> dict[str, list[int]]:
    """Return the numbers of new tokens per sequence of each case."""
    return {
        "prompt alone": [n_tokens],
        "step alone": [1] * n_rows,
        "prompt beside the step": [n_tokens] + [1] * (n_rows - 1),
        "mixed prompts": [1 + i * n_tokens // n_rows for i in range(n_rows)],
        "mixed prompts, each alone": [],
    }


def measure(options: argparse.Namespace) -> None:
    """Measure, print the tables and write the results."""
    results = {}
    kinds: tuple[EngineKind, ...] = ("torch", "kernels")
    for kind in kinds:
        bundle = model_dir.load(shipped_model())
        engine = open_engine(
            bundle, EngineOptions(device="cpu", threads=options.threads, kind=kind)
        )
        for n_rows in options.rows:
            cases = make_cases(n_rows, options.tokens)
            times: dict[str, list[float]] = {name: [] for name in cases}
            for number in range(options.rounds + 1):
                for name, counts in cases.items():
                    each = [[n] for n in cases["mixed prompts"]] if not counts else [counts]
                    milliseconds = sum(time_call(engine, part) for part in each)
                    if number > 0:  # the first round is the warm-up
                        times[name].append(milliseconds)
            results[f"{kind}, {n_rows} sequences"] = times
    rows = [["", "ms", "relative to the prompt alone"]]
    for setup, times in results.items():
        for name, values in times.items():
            ratio = statistics.median(
                a / b for a, b in zip(values, times["prompt alone"], strict=True)
            )
            rows.append([f"{setup}: {name}", f"{statistics.median(values):.1f}", f"{ratio:.2f}"])
    harness.save(
        options,
        {"threads": options.threads, "prompt_tokens": options.tokens, "milliseconds": results},
    )
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "admission.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of the prompt")
    parser.set_defaults(rows=(16, 64))
    quick = {"rounds": 1, "tokens": 8, "rows": (4,)}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
