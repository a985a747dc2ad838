"""Measure the cost of a decoded token by context depth, relative to the memory bandwidth.

    python -m versus.decode.lengths --shape 12M

Each round decodes at every depth, and reads a large array to measure the current bandwidth. A token
must read the weights once, and the keys and values of all earlier tokens: a constant plus a linear
cost. The fitted line and the largest deviation of a median from it are printed.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch

from tgen.benchmark.kv_cache import fit_line
from tgen.benchmark.statistics import timing
from tgen.config import STORED_BYTES, CacheDtype
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.weights import pack_weights
from versus import harness
from versus.decode.model_shapes import SHAPES, make_arrays, make_config

_STEPS = 9


def measure_round(
    engine: CpuEngine, cache: tuple[np.ndarray, np.ndarray], lengths: Sequence[int]
) -> dict[int, float]:
    """Return the median seconds of a token after each length of the cached keys and values."""
    keys, values = cache
    medians = {}
    for length in lengths:
        engine.restore(keys[:, :, :length], values[:, :, :length])
        seconds = []
        for _ in range(_STEPS):
            engine.rewind([length])
            start = time.perf_counter()
            engine.extend([[7]])
            seconds.append(time.perf_counter() - start)
        medians[length] = statistics.median(seconds)
    return medians


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    lengths = options.lengths
    config = make_config(options.shape, lengths[-1] + 1)
    arrays = make_arrays(config)
    torch.set_num_threads(options.threads)
    n_threads = options.threads
    weights = pack_weights(config, dict(arrays), options.dtype, n_threads=n_threads)
    engine = CpuEngine(weights, n_threads=n_threads, cache_dtype=options.cache_dtype)
    ids = np.random.default_rng(1).integers(config.vocab_size, size=lengths[-1]).tolist()
    engine.extend([ids])
    cache = engine.keys_and_values()
    array = torch.ones(options.read_bytes // 4)
    rounds, bandwidths = [], []
    for number in range(options.rounds + 1):
        medians = measure_round(engine, cache, lengths)
        start = time.perf_counter()
        array.sum()
        bandwidth = options.read_bytes / (time.perf_counter() - start)
        if number > 0:  # the first round is the warm-up
            rounds.append(medians)
            bandwidths.append(bandwidth)
    timings = [timing([medians[length] for medians in rounds]) for length in lengths]
    line = fit_line(lengths, timings)
    bandwidth = statistics.median(bandwidths)
    weight_bytes = STORED_BYTES[options.dtype] * sum(a.size for a in arrays.values())
    per_token = config.cache_bytes_per_token(engine.cache_dtype)
    rows = [["context depth", "ms per token", "fitted", "% of bandwidth"]]
    for length, taken in zip(lengths, timings, strict=True):
        n_bytes = weight_bytes + length * per_token
        percent = f"{n_bytes / taken.median / bandwidth:.0%}"
        rows.append(
            [f"{length}", f"{taken.median * 1e3:.3f}", f"{line.at(length) * 1e3:.3f}", percent]
        )
    suffix = f"_cache_{options.cache_dtype}" if options.cache_dtype else ""
    options.result = f"lengths_{options.shape}_{options.dtype}{suffix}.json"
    harness.save(
        options,
        {
            "threads": options.threads,
            "rounds": rounds,
            "bytes_per_second": bandwidths,
            "intercept_seconds": line.intercept,
            "slope_seconds_per_token": line.slope,
            "max_deviation": line.max_deviation,
        },
    )
    print(harness.format_table(rows))
    print(
        f"{line.intercept * 1e3:.3f} ms + {line.slope * 1e6:.3f} µs per earlier token (largest "
        f"deviation {line.max_deviation:.0%}); memory bandwidth {bandwidth / 1e9:.1f} GB/s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "lengths_SHAPE_DTYPE.json")
    parser.add_argument("--shape", choices=list(SHAPES), default="12M")
    parser.add_argument("--dtype", choices=list(STORED_BYTES), default="float32")
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), help="of keys and values")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    lengths = [64 << i for i in range(8)]
    parser.set_defaults(lengths=lengths, read_bytes=1 << 30)
    quick = {
        "shape": "tiny",
        "rounds": 1,
        "threads": 1,
        "lengths": [16, 32, 64],
        "read_bytes": 1 << 20,
    }
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
