"""What a token costs after so many others, and how near that is to what memory allows.

    python benchmarks/decode/lengths.py --shape 12M

Each round decodes at every length in turn, and reads a large array to know how fast memory is now.
A token must read the weights once, and the keys and values of all before it: a flat cost plus a
straight line. That line through the medians is printed, and the largest deviation from it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from shapes import SHAPES, config_of, random_arrays
from tgen.engine.cpu.engine import CpuEngine

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BYTES_A_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "int8": 34 / 32}
_STEPS = 9
_READ_BYTES = 1 << 30


def one_round(engine: CpuEngine, held: tuple[np.ndarray, np.ndarray]) -> dict[int, float]:
    """Seconds a token takes after each length of `held`, keys and values."""
    keys, values = held
    taken = {}
    for length in LENGTHS:
        engine.restore(keys[:, :, :length], values[:, :, :length])
        steps = []
        for _ in range(_STEPS):
            engine.rewind([length])
            began = time.perf_counter()
            engine.extend([[7]])
            steps.append(time.perf_counter() - began)
        taken[length] = statistics.median(steps)
    return taken


def _measure(arguments: argparse.Namespace) -> None:
    content = record.origin()
    config = config_of(arguments.shape, LENGTHS[-1] + 1)
    arrays = random_arrays(config)
    torch.set_num_threads(arguments.threads)
    engine = CpuEngine(config, dict(arrays), n_threads=arguments.threads, stored=arguments.weights)
    ids = np.random.default_rng(1).integers(config.vocab_size, size=LENGTHS[-1]).tolist()
    engine.extend([ids])
    held = engine.keys_and_values()
    memory = torch.ones(_READ_BYTES // 4)
    rounds, bandwidths = [], []
    for number in range(arguments.rounds + 1):
        taken = one_round(engine, held)
        began = time.perf_counter()
        memory.sum()
        read = _READ_BYTES / (time.perf_counter() - began)
        if number > 0:  # the first warms up
            rounds.append(taken)
            bandwidths.append(read)
    medians = [statistics.median(taken[length] for taken in rounds) for length in LENGTHS]
    slope, flat = np.polyfit(LENGTHS, medians, 1, w=1 / np.array(medians))
    line = flat + slope * np.array(LENGTHS)
    deviation = float(np.abs(line / medians - 1).max())
    bandwidth = statistics.median(bandwidths)
    weight_bytes = BYTES_A_WEIGHT[arguments.weights] * sum(a.size for a in arrays.values())
    rows = [["tokens before", "ms a token", "on the line", "of the bandwidth"]]
    for length, median, fitted in zip(LENGTHS, medians, line, strict=True):
        read = weight_bytes + length * config.cache_bytes_per_token
        share = read / median / bandwidth
        rows.append([f"{length}", f"{median * 1e3:.3f}", f"{fitted * 1e3:.3f}", f"{share:.0%}"])
    record.write(
        arguments.out or record.RESULTS / f"lengths_{arguments.shape}_{arguments.weights}.json",
        content
        | {
            "threads": arguments.threads,
            "rounds": rounds,
            "bytes_a_second": bandwidths,
            "flat_seconds": float(flat),
            "seconds_a_token_before": float(slope),
            "largest_deviation": deviation,
        },
    )
    print(record.table(rows))
    print(
        f"{flat * 1e3:.3f} ms + {slope * 1e6:.3f} µs a token before; at most {deviation:.0%} off; "
        f"memory gives {bandwidth / 1e9:.1f} GB/s"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="12M")
    parser.add_argument("--weights", choices=list(BYTES_A_WEIGHT), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    _measure(parser.parse_args())


if __name__ == "__main__":
    main()
