"""Measure what `--words` costs in speed and in bits: the shipped model and the words of a text.

    python -m versus.decode.words tinyshakespeare.txt

The words are those of the first nine tenths of the text. Texts are generated with and without the
constraint, interleaved. On the last tenth, which the shipped model was not trained on, each token's
distribution is compared with the one under the constraint: the bits that the constraint removes are
-log2 of the probability that it leaves, given the text before.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, SamplingConfig
from tgen.generation.logprobs import predictions
from tgen.generation.truncation import softmax
from tgen.generation.words import split_words
from tgen.loaded_model import LoadedModel, open_model
from versus import harness
from versus.decode.drafts import PROMPTS


def measure_speed(
    model: LoadedModel, words: bytes, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Return tokens per second without and with the constraint, by round."""
    rounds = []
    for number in range(options.rounds + 1):
        rates = {}
        for name, text in (("free", None), ("words", words)):
            sampling = SamplingConfig(max_new_tokens=options.tokens, words=text, seed=number)
            start, n = time.perf_counter(), 0
            for prompt in PROMPTS:
                n += sum(1 for _ in model.tokens([model.encode(prompt)], sampling=sampling))
            rates[name] = n / (time.perf_counter() - start)
        if number > 0:  # the first round is the warm-up
            rounds.append(rates)
    return rounds


def measure_bits(model: LoadedModel, words: bytes, text: bytes, n_windows: int) -> dict[str, float]:
    """Return the bits per token of a text, and those that the constraint removes."""
    known = model.vocabulary.known_words(SamplingConfig(words=words))
    assert known is not None
    ids, length = model.encode(text), model.engine.context_length
    bytes_of, n_tokens, n_impossible = model.vocabulary.bytes_of, 0, 0
    free = removed = 0.0
    for start in range(0, min(len(ids) - 1, n_windows * length), length):
        window = ids[start : start + length + 1]
        before = bytes_of(window[0])
        for logits, targets in predictions(model.engine, window, 1):
            for row, p, target in zip(logits, softmax(logits), targets, strict=True):
                allowed = row.copy()
                known.apply(allowed, before, sorted(model.vocabulary.ends))
                possible = np.isfinite(allowed)
                removed -= math.log2(p[possible].sum())
                free -= math.log2(p[target])
                n_impossible += not possible[target]
                n_tokens += 1
                before = (before + bytes_of(target))[-300:]
    return {
        "tokens": n_tokens,
        "bits_per_token": free / n_tokens,
        "removed_bits_per_token": removed / n_tokens,
        "impossible_tokens": n_impossible,
    }


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    model = open_model(shipped_model(), EngineOptions(device="cpu", threads=options.threads))
    text = options.text.read_bytes() if options.text else b"".join(harness.generate_text(200_000))
    cut = len(text) * 9 // 10
    words, held_out = text[:cut], text[cut:]
    start = time.perf_counter()
    model.vocabulary.known_words(SamplingConfig(words=words))
    seconds = time.perf_counter() - start
    rounds = measure_speed(model, words, options)
    bits = measure_bits(model, words, held_out, options.windows)
    free, constrained = (statistics.median(r[name] for r in rounds) for name in ("free", "words"))
    ratio = statistics.median(r["words"] / r["free"] for r in rounds)
    rows = [
        ["known words", f"{len(split_words(words)):,}"],
        ["seconds to read them", f"{seconds:.2f}"],
        ["tokens/s without --words", f"{free:,.0f}"],
        ["tokens/s with --words", f"{constrained:,.0f} ({ratio:.2f})"],
        ["held-out tokens", f"{bits['tokens']:,}"],
        ["bits per token without --words", f"{bits['bits_per_token']:.3f}"],
        ["bits per token that it removes", f"{bits['removed_bits_per_token']:.4f}"],
        ["held-out tokens that it forbids", f"{bits['impossible_tokens'] / bits['tokens']:.2%}"],
    ]
    harness.save(options, {"seconds": seconds, "rounds": rounds, **bits})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "words.json")
    parser.add_argument("text", type=Path, nargs="?", help="text (default: a generated one)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--windows", type=int, default=100)
    quick = {"rounds": 1, "tokens": 12, "windows": 1}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
