"""What it gains to compute rows together: the same prompts at several batch sizes, in one process.

    python benchmarks/decode/batches.py

The batch sizes take turns; each must write the same texts. Whole loops are timed, with sampling and
reports, as `tgen generate --input` runs them.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from tgen.api import Model, load
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import SamplingConfig
from tgen.generation.sampling import row_seed
from tgen.generation.sequence import Request

SIZES = (1, 8, 32, 64, 128)
SAMPLING = SamplingConfig(max_new_tokens=20, seed=1)


def one_turn(model: Model, n_rows: int, batch_size: int) -> tuple[float, list[list[int]]]:
    """Rows a second, and their tokens."""
    ids = model.encode("the king")
    rows = iter([Request(ids, replace(SAMPLING, seed=row_seed(1, i))) for i in range(n_rows)])
    written: list[list[int]] = [[] for _ in range(n_rows)]
    began = time.perf_counter()
    for token in model.rows(lambda _: next(rows, None), n_rows=batch_size):
        written[token.row].append(token.id)
    return n_rows / (time.perf_counter() - began), written


def _measure(arguments: argparse.Namespace) -> None:
    content = record.origin()
    model = load(shipped_model(), device="cpu", threads=arguments.threads)
    rounds = []
    for number in range(arguments.rounds + 1):
        taken = {size: one_turn(model, arguments.rows, size) for size in SIZES}
        if any(texts != taken[1][1] for _, texts in taken.values()):
            raise SystemExit("the batch size changed a text")
        if number > 0:  # the first warms up
            rounds.append({size: rate for size, (rate, _) in taken.items()})
    rows = [["rows at a time", "rows/s", "of one"]]
    for size in SIZES:
        rate = statistics.median(r[size] for r in rounds)
        times = statistics.median(r[size] / r[1] for r in rounds)
        rows.append([str(size), f"{rate:,.0f}", f"{times:.2f}"])
    record.write(
        arguments.out or record.RESULTS / "batches.json",
        content | {"threads": arguments.threads, "rows": arguments.rows, "rounds": rounds},
    )
    print(record.table(rows))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--out", type=Path)
    _measure(parser.parse_args())


if __name__ == "__main__":
    main()
