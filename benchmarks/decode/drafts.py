"""What guessing ahead gains: the shipped model with drafts, without, and without its table.

    python benchmarks/decode/drafts.py

The arms take turns over five prompts, greedy and sampled; each must write the same text. Whole
loops are timed, with sampling and reports, as `tgen generate` runs them.
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

PROMPTS = ("What is", "ROMEO:\n", "KING RICHARD III:\nNow", "The ", "First Citizen:\nBefore we")
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0),
    "temperature 0.8": SamplingConfig(temperature=0.8, seed=1),
}
ARMS = {"off": "off", "auto": "auto", "auto, without the table": "auto"}


def one_turn(model: Model, draft: str, sampling: SamplingConfig, n: int) -> tuple[float, list[int]]:
    """Tokens a second, and the tokens."""
    written: list[int] = []
    began = time.perf_counter()
    for prompt in PROMPTS:
        ids = model.encode(prompt)
        tokens = model.tokens([ids], sampling=replace(sampling, max_new_tokens=n), draft=draft)
        written += [token.id for token in tokens]
    return len(written) / (time.perf_counter() - began), written


def _measure(arguments: argparse.Namespace) -> None:
    content = record.origin()
    whole = load(shipped_model(), device="cpu", threads=arguments.threads)
    models = dict.fromkeys(ARMS, whole)
    models["auto, without the table"] = plain = Model(whole.bundle, whole.engine)
    plain.ngrams = {}
    results = []
    rows = [["tokens/s", *ARMS]]
    for n in (100, 500):
        for kind, sampling in SAMPLINGS.items():
            rounds = []
            for number in range(arguments.rounds + 1):
                taken = {
                    name: one_turn(models[name], draft, sampling, n) for name, draft in ARMS.items()
                }
                if any(text != taken["off"][1] for _, text in taken.values()):
                    raise SystemExit(f"{kind}, {n} tokens: drafts changed the text")
                if number > 0:  # the first warms up
                    rounds.append({name: rate for name, (rate, _) in taken.items()})
            results.append({"tokens": n, "sampling": kind, "rounds": rounds})
            cells = []
            for name in ARMS:
                rate = statistics.median(r[name] for r in rounds)
                times = statistics.median(r[name] / r["off"] for r in rounds)
                cells.append(f"{rate:,.0f}" if name == "off" else f"{rate:,.0f} ({times:.2f})")
            rows.append([f"{len(PROMPTS)} x {n}, {kind}", *cells])
    record.write(
        arguments.out or record.RESULTS / "drafts.json",
        content | {"threads": arguments.threads, "results": results},
    )
    print(record.table(rows))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    _measure(parser.parse_args())


if __name__ == "__main__":
    main()
