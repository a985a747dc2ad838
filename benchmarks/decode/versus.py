"""tgen, transformers and llama.cpp on the same weights: they take turns, medians are compared.

    python benchmarks/decode/versus.py --shape 12M
    python benchmarks/decode/versus.py --shape 135M --weights int8

llama.cpp is measured where llama-cpp-python and gguf are installed (built on this machine, so that
it uses what the processor has), transformers where it is. Each round gives every engine a prompt of
512 tokens and lets it decode 64 more; 16 rows are decoded apart. A figure in brackets is how much
faster tgen is than that engine. With --busy other processes keep every processor busy meanwhile.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from arms import Arm, LlamaCpp, Tgen, Transformers
from shapes import SHAPES, config_of, random_arrays
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.errors import TgenError

PROMPT, STEPS, ROWS = 512, 64, 16
_REST = 0.5  # seconds, until the threads of the engine before have stopped looking for work


def open_arms(shape: str, weights: str, threads: int, folder: Path) -> dict[str, Arm]:
    """Every engine that is installed."""
    config = config_of(shape, 2048)
    arrays = random_arrays(config)
    arms: dict[str, Arm] = {"tgen": Tgen(config, arrays, threads, weights)}
    if weights == "float32" and find_spec("transformers"):
        arms["transformers"] = Transformers(config, arrays, threads)
    if weights != "bfloat16" and find_spec("llama_cpp") and find_spec("gguf"):
        path = folder / "model.gguf"
        write_gguf(path, config, arrays, stored=weights)
        arms["llama.cpp"] = LlamaCpp(config, path, threads)
    return arms


def one_round(arm: Arm, ids: list[int]) -> dict[str, float]:
    """Tokens a second of each kind of work."""
    time.sleep(_REST)
    arm.rows(1)
    took = _seconds(lambda: arm.prefill(ids))
    steps = [_seconds(lambda: arm.step(7)) for _ in range(STEPS)]
    arm.rows(ROWS)
    arm.prefill(ids[:8])
    batch = [_seconds(lambda: arm.step(7)) for _ in range(STEPS // 4)]
    return {
        f"prefill of {PROMPT}": PROMPT / took,
        "decoding": 1 / statistics.median(steps),
        f"decoding {ROWS} rows": ROWS / statistics.median(batch),
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _differences(arms: dict[str, Arm], ids: list[int]) -> dict[str, float]:
    """The largest difference of each engine's logits from tgen's, after the prompt."""
    logits = {}
    for name, arm in arms.items():
        arm.rows(1)
        logits[name] = arm.prefill(ids)[0].copy()
    return {name: float(np.abs(found - logits["tgen"]).max()) for name, found in logits.items()}


@contextlib.contextmanager
def _busy(n: int) -> Iterator[None]:
    """Keeps n processors busy with something else."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()


def _measure(arguments: argparse.Namespace) -> None:
    content = record.origin()
    others = os.cpu_count() or 1 if arguments.busy else 0
    with tempfile.TemporaryDirectory(prefix="versus-") as folder, _busy(others):
        arms = open_arms(arguments.shape, arguments.weights, arguments.threads, Path(folder))
        vocab_size = SHAPES[arguments.shape]["vocab_size"]
        ids = np.random.default_rng(1).integers(vocab_size, size=PROMPT).tolist()
        differences = _differences(arms, ids)
        rounds = []
        for number in range(arguments.rounds + 1):
            taken = {name: one_round(arm, ids) for name, arm in arms.items()}
            if number > 0:  # the first warms up
                rounds.append(taken)
    kinds = list(rounds[0]["tgen"])
    rows = [["tokens/s", *arms]]
    for kind in kinds:
        rows.append([kind])
        for name in arms:
            rate = statistics.median(r[name][kind] for r in rounds)
            times = statistics.median(r["tgen"][kind] / r[name][kind] for r in rounds)
            rows[-1].append(f"{rate:,.0f}" if name == "tgen" else f"{rate:,.0f} ({times:.2f})")
    rows.append(["largest difference", *(f"{differences[name]:.1e}" for name in arms)])
    busy = "_busy" if arguments.busy else ""
    name = f"versus_{arguments.shape}_{arguments.weights}{busy}.json"
    record.write(
        arguments.out or record.RESULTS / name,
        content | {"rounds": rounds, "differences": differences, "threads": arguments.threads},
    )
    print(record.table(rows))


def main() -> None:
    """Measures; an expected failure is two lines on stderr and an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="12M")
    parser.add_argument("--weights", choices=["float32", "bfloat16", "int8"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="beside others that compute")
    parser.add_argument("--out", type=Path)
    try:
        _measure(parser.parse_args())
    except TgenError as error:
        print(f"error: {error.message}\n{error.hint}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
