"""Measure speculative decoding with n-gram drafts and with a draft model.

    python -m versus.decode.drafts

The shipped model runs with and without drafts and its n-gram table, over five prompts, greedy and
sampled. A model of 1.1 B parameters in int8 runs with drafts of one of 135 M. Both have random
weights: the draft model computes its passes, and then a share of its draft tokens is replaced by
those that are right. The configurations are interleaved and must generate the same text. The whole
generation loop is timed, with sampling, as in `tgen generate`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tgen.checkpoint.model_dir import ModelBundle
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import Draft, EngineOptions, SamplingConfig
from tgen.engine.base import Engine, Logits
from tgen.engine.open_engine import open_engine
from tgen.loaded_model import Decoding, LoadedModel, open_model
from tgen.tokenizer import train_bpe
from versus import harness
from versus.decode.model_shapes import make_arrays, make_config

PROMPTS = ("What is", "ROMEO:\n", "KING RICHARD III:\nNow", "The ", "First Citizen:\nBefore we")
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0),
    "temperature 0.8": SamplingConfig(temperature=0.8, seed=1),
}
MODES: dict[str, Draft] = {"off": "off", "auto": "auto", "auto, without the table": "auto"}
ACCEPTANCE = (60, 70, 80)  # percent of the draft tokens that are right


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


class SimulatedEngine:
    """A draft model's engine whose most likely token is the right one at a share of positions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.likely: list[int] = []  # by position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def extend(self, tokens: Sequence[Sequence[int]], *, every_position: bool = False) -> Logits:
        """Compute the logits, and make a token the most likely one."""
        logits = self._engine.extend(tokens, every_position=every_position)
        token = self.likely[min(self._engine.lengths[0], len(self.likely) - 1)]
        logits[:, token] = logits.max() + 1
        return logits

    def choose(self, ids: list[int], n_prompt: int, percent: int) -> None:
        """Choose the positions of a text at which the draft is right, `percent` of the new ones."""
        n = len(ids) - n_prompt
        wrong = np.random.default_rng(0).permutation(n) >= n * percent / 100
        new = np.where(wrong, np.array(ids[n_prompt:]) ^ 1, ids[n_prompt:])
        self.likely = [*ids[:n_prompt], *new.tolist()]


def open_random(shape: str, vocab_size: int, options: argparse.Namespace) -> LoadedModel:
    """Open a model with random weights, which are never on the disk."""
    config = replace(make_config(shape, 1024), vocab_size=vocab_size)
    arrays, tokenizer = make_arrays(config), train_bpe([PROMPTS[0].encode()], vocab_size=300)
    bundle = ModelBundle(Path(shape), config, tokenizer, arrays, frozenset(), ())
    engine = open_engine(
        bundle, EngineOptions(device="cpu", threads=options.threads, dtype="int8", kind="kernels")
    )
    return LoadedModel(replace(bundle, arrays={}), engine)


def measure_draft_model(options: argparse.Namespace) -> dict[str, Any]:
    """Measure drafts of a model at several rates of acceptance; print the table."""
    large, small = options.shapes
    vocab_size = make_config(large, 1024).vocab_size
    draft_model, model = (open_random(shape, vocab_size, options) for shape in (small, large))
    simulated = SimulatedEngine(draft_model.engine)
    model.draft_with(LoadedModel(draft_model.bundle, simulated))
    sampling = replace(SAMPLINGS["greedy"], max_new_tokens=options.draft_tokens)
    prompt = model.encode(PROMPTS[-1])

    def run(percent: int | None) -> tuple[float, list[int]]:
        decoding = Decoding(draft="auto" if percent else "off")
        if percent:
            simulated.choose([*prompt, *plain], len(prompt), percent)
        start = time.perf_counter()
        ids = [token.id for token in model.tokens([prompt], sampling=sampling, decoding=decoding)]
        return len(ids) / (time.perf_counter() - start), ids

    _, plain = run(None)
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds + 1):
        speeds = {}
        for percent in (None, *ACCEPTANCE):
            speeds[f"{percent} %" if percent else "off"], ids = run(percent)
            if ids != plain:
                raise SystemExit(f"error: {percent} %: drafts changed the text")
        if number > 0:
            rounds.append(speeds)
    medians = [statistics.median(r[mode] for r in rounds) for mode in rounds[0]]
    ratios = [statistics.median(r[mode] / r["off"] for r in rounds) for mode in rounds[0]]
    cells = [f"{rate:.1f} ({ratio:.2f})" for rate, ratio in zip(medians, ratios, strict=True)]
    print(harness.format_table([["tokens/s", *rounds[0]], [f"{small} for {large}", *cells]]))
    return {"shapes": options.shapes, "tokens": options.draft_tokens, "rounds": rounds}


def measure(options: argparse.Namespace) -> None:
    """Measure, print the tables and write the results."""
    model = open_model(shipped_model(), EngineOptions(device="cpu", threads=options.threads))
    models = dict.fromkeys(MODES, model)
    without_table = LoadedModel(model.bundle, model.engine)
    without_table.__dict__["ngrams"] = []
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
    print(harness.format_table(rows))
    content = {"threads": options.threads, "results": results}
    harness.save(options, content | {"draft_model": measure_draft_model(options)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "drafts.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--draft-tokens", type=int, default=128, help="tokens per text of 1.1 B")
    parser.set_defaults(lengths=(100, 500), shapes=("1.1B", "135M"))
    quick = {"rounds": 1, "threads": 1, "lengths": (12,)}
    quick |= {"shapes": ("12M", "tiny"), "draft_tokens": 12}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
