"""Compare libraries for constrained generation: llguidance and outlines-core.

    pip install llguidance outlines-core
    python -m versus.decode.constraints

Measured are the compilation of a constraint and the computation of the allowed tokens, while tokens
are sampled at random from those allowed, with a small and a large vocabulary. Missing libraries are
skipped. xgrammar is not compared: it requires torch and transformers.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import SamplingConfig
from tgen.generation.constrained import Grammars
from versus import harness

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 5}},
            "age": {"type": "integer"},
        },
        "required": ["name", "tags", "age"],
        "additionalProperties": False,
    }
)
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "date": {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    "sentence": {"regex": r"[A-Z][a-z]{1,12}( [a-z]{1,12}){2,9}\."},
    "schema": {"json_schema": SCHEMA},
}
_MAX_TOKENS = 400
Choose = Callable[[list[int]], int]


def run_llguidance(tokens: list[bytes], constraint: dict[str, Any], choose: Choose) -> list[float]:
    """Return the seconds of the compilation, then of each token, with tgen's own code."""
    grammars = Grammars(tokens, [], lambda data: [tokens.index(bytes([byte])) for byte in data])
    start = time.perf_counter()
    matcher = grammars.matcher(SamplingConfig(**constraint))
    assert matcher is not None
    seconds = [time.perf_counter() - start]
    while not matcher.stopped and len(seconds) < _MAX_TOKENS:
        start = time.perf_counter()
        allowed = matcher.allowed(len(tokens))
        seconds.append(time.perf_counter() - start)
        matcher.accept(choose(np.flatnonzero(allowed).tolist()))
    return seconds


def run_outlines(tokens: list[bytes], constraint: dict[str, Any], choose: Choose) -> list[float]:
    """Return the seconds of the compilation, then of each token."""
    outlines_core = import_module("outlines_core")
    build_regex_from_schema = import_module("outlines_core.json_schema").build_regex_from_schema
    ids: dict[bytes, list[int]] = {}
    for i, token in enumerate(tokens):
        if token:
            ids.setdefault(token, []).append(i)
    vocabulary = outlines_core.Vocabulary(len(tokens), ids)
    start = time.perf_counter()
    regex = constraint.get("regex") or build_regex_from_schema(constraint["json_schema"])
    guide = outlines_core.Guide(outlines_core.Index(regex, vocabulary))
    seconds = [time.perf_counter() - start]
    while not guide.is_finished() and len(seconds) < _MAX_TOKENS:
        start = time.perf_counter()
        allowed = guide.get_tokens()
        seconds.append(time.perf_counter() - start)
        candidates = [token for token in allowed if token < len(tokens)]
        if not candidates:
            break
        guide.advance(choose(candidates))
    return seconds


LIBRARIES = {"llguidance": run_llguidance, "outlines-core": run_outlines}


def make_vocabularies(large_size: int) -> dict[str, list[bytes]]:
    """Return the shipped model's vocabulary, and a large one of concatenations of its tokens."""
    tokenizer = model_dir.load(shipped_model()).tokenizer
    small = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    source, large = random.Random(0), set(small)
    while len(large) < large_size:
        large.add(b"".join(source.choices(small, k=2))[:16])
    return {
        f"{len(small):,}": small,
        f"{large_size:,}": [*small, *sorted(large - set(small))],
    }


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            harness.skip(library, "not installed")
    header = [cell for name in versions for cell in (f"{name}: compile", "per token")]
    rows = [["constraint", "vocabulary", *header]]
    results = []
    for size, tokens in make_vocabularies(options.large).items():
        for name, constraint in CONSTRAINTS.items():
            measured: dict[str, dict[str, float]] = {}
            for library in versions:
                source = random.Random(1)
                trials = [
                    LIBRARIES[library](tokens, constraint, source.choice)
                    for _ in range(options.rounds)
                ]
                measured[library] = {
                    "compile_ms": 1000 * statistics.median(trial[0] for trial in trials),
                    "token_ms": 1000 * statistics.mean(t for trial in trials for t in trial[1:]),
                }
            results.append({"constraint": name, "vocabulary": size, **measured})
            cells = [f"{ms:,.3f} ms" for one in measured.values() for ms in one.values()]
            rows.append([name, size, *cells])
    harness.save(options, {"versions": versions, "results": results})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "constraints.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(large=50_000)
    harness.run(measure, harness.parse(parser, arguments, {"rounds": 1, "large": 2000}))


if __name__ == "__main__":
    main()
