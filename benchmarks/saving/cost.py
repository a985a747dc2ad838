"""What a save costs: a state of 100 MB, and writing, syncing, hashing the same bytes plainly.

    python benchmarks/saving/cost.py [--folder DIR]

Both in turns, in the same folder, so that the disk is equally busy. The plain way is one file:
written, fsynced, and a SHA-256 over its bytes; a state is hashed, written with its manifest, its
size asked for, its folder published by a rename, files and folders synced. The ratio is of medians.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from tgen.checkpoint import safetensors_file
from tgen.runs.storage import state as run_state

MEGABYTES, TENSORS = 100, 40


def main() -> None:
    """Saves in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draws = np.random.default_rng(0)
    shape = (MEGABYTES * 1_000_000 // TENSORS // 4,)
    arrays = {f"model/{i}": draws.random(shape, np.float32) for i in range(TENSORS)}
    content = safetensors_file.serialize(arrays)
    times: dict[str, list[float]] = {"state": [], "plain": []}
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for i in range(options.rounds):
            out = folder / f"{i}"
            times["plain"].append(seconds(lambda: plain(folder / "plain", content)))
            times["state"].append(seconds(lambda out=out: state(out, arrays)))
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["state"] / medians["plain"]
    for name, value in medians.items():
        print(f"{name}: {value * 1000:.0f} ms, {len(content) / value / 1e6:.0f} MB/s")
    print(f"a state costs {ratio:.2f} times plain writing, syncing and hashing")
    if options.out:
        found = {"bytes": len(content), "seconds": times, "median_seconds": medians, "ratio": ratio}
        record.write(options.out, record.origin() | found)


def state(out: Path, arrays: dict[str, "np.ndarray"]) -> None:
    """As a run saves it."""
    run_state.save_state(out, {"step": 1, "best_step": 1}, arrays, run="r", made_by={})


def plain(path: Path, content: bytes) -> None:
    """One file, written as plainly as it can be and yet be there after a power loss."""
    path.unlink(missing_ok=True)
    with open(path, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    hashlib.sha256(content).hexdigest()


def seconds(action: Callable[[], None]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
