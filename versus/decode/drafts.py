"""Measure speculative decoding: the shipped model with and without drafts and its n-gram table.

    python -m versus.decode.drafts

The configurations are interleaved over five prompts, greedy and sampled, and must generate the same
text. The whole generation loop is timed, with sampling, as in `tgen generate`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import Draft, EngineOptions, SamplingConfig
from tgen.loaded_model import Decoding, LoadedModel, open_model
from versus import harness

PROMPTS = ("What is", "ROMEO:\n", "KING RICHARD III:\nNow", "The ", "First Citizen:\nBefore we")
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0),
    "temperature 0.8": SamplingConfig(temperature=0.8, seed=1),
}
MODES: dict[str, Draft] = {"off": "off", "auto": "auto", "auto, without the table": "auto"}


def generate(
    model: LoadedModel, draft: Draft, sampling: SamplingConfig, n_tokens: int
) -> tuple[float, list[int]]:
    """Return tokens per second, and the tokens."""
    ids: list[int] = []
    sampling = replace(sampling, max_new_tokens=n_tokens)
    start = time.perf_counter()
    for prompt in PROMPTS:
        decoding = Decoding(draft=draft)
        tokens = model.tokens([model.encode(prompt)], sampling=sampling, decoding=decoding)
        ids += [token.id for token in tokens]
    return len(ids) / (time.perf_counter() - start), ids


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    model = open_model(shipped_model(), EngineOptions(device="cpu", threads=options.threads))
    models = dict.fromkeys(MODES, model)
    without_table = LoadedModel(model.bundle, model.engine)
    without_table.__dict__["ngrams"] = {}
    models["auto, without the table"] = without_table
    results = []
    rows = [["tokens/s", *MODES]]
    for n in options.lengths:
        for name, sampling in SAMPLINGS.items():
            rounds = []
            for number in range(options.rounds + 1):
                taken = {
                    mode: generate(models[mode], draft, sampling, n)
                    for mode, draft in MODES.items()
                }
                if any(ids != taken["off"][1] for _, ids in taken.values()):
                    raise SystemExit(f"error: {name}, {n} tokens: drafts changed the text")
                if number > 0:  # the first round is the warm-up
                    rounds.append({mode: rate for mode, (rate, _) in taken.items()})
            results.append({"tokens": n, "sampling": name, "rounds": rounds})
            cells = []
            for mode in MODES:
                rate = statistics.median(r[mode] for r in rounds)
                ratio = statistics.median(r[mode] / r["off"] for r in rounds)
                cells.append(f"{rate:,.0f}" if mode == "off" else f"{rate:,.0f} ({ratio:.2f})")
            rows.append([f"{len(PROMPTS)} x {n}, {name}", *cells])
    harness.save(options, {"threads": options.threads, "results": results})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "drafts.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.set_defaults(lengths=(100, 500))
    harness.run(
        measure, harness.parse(parser, arguments, {"rounds": 1, "threads": 1, "lengths": (12,)})
    )


if __name__ == "__main__":
    main()
