"""Measure throughput by batch size: the same prompts at several batch sizes, interleaved.

    python -m versus.decode.batches

Every batch size must generate the same texts. The whole generation loop is timed, with sampling, as
in `tgen generate --input`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, SamplingConfig
from tgen.loaded_model import LoadedModel, open_model
from versus import harness

SAMPLING = SamplingConfig(max_new_tokens=20, seed=1)


def measure_batch(
    model: LoadedModel, n_prompts: int, batch_size: int
) -> tuple[float, list[list[int]]]:
    """Return prompts per second, and the generated tokens of each."""
    prompts = [model.encode("the king")] * n_prompts
    texts: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    for token in model.tokens(prompts, sampling=SAMPLING, batch_size=batch_size):
        texts[token.sequence].append(token.id)
    return n_prompts / (time.perf_counter() - start), texts


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    model = open_model(shipped_model(), EngineOptions(device="cpu", threads=options.threads))
    rounds = []
    for number in range(options.rounds + 1):
        results = {size: measure_batch(model, options.prompts, size) for size in options.sizes}
        if any(texts != results[1][1] for _, texts in results.values()):
            raise SystemExit("error: the batch size changed a text")
        if number > 0:  # the first round is the warm-up
            rounds.append({size: rate for size, (rate, _) in results.items()})
    rows = [["batch size", "prompts/s", "relative to 1"]]
    for size in options.sizes:
        rate = statistics.median(r[size] for r in rounds)
        ratio = statistics.median(r[size] / r[1] for r in rounds)
        rows.append([str(size), f"{rate:,.0f}", f"{ratio:.2f}"])
    harness.save(
        options, {"threads": options.threads, "prompts": options.prompts, "rounds": rounds}
    )
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "batches.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=500)
    parser.set_defaults(sizes=(1, 8, 32, 64, 128))
    harness.run(
        measure,
        harness.parse(
            parser, arguments, {"rounds": 1, "threads": 1, "prompts": 6, "sizes": (1, 4)}
        ),
    )


if __name__ == "__main__":
    main()
