"""What holds a text to a form: llguidance beside outlines-core, on a small and a large vocabulary.

    pip install llguidance outlines-core
    python benchmarks/decode/constraints.py

Timed are compiling a form, and saying which tokens may follow, while documents are drawn at random
from what is allowed. xgrammar is left out: it needs torch and transformers to be imported.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import numpy as np
import outlines_core
from outlines_core.json_schema import build_regex_from_schema

import record
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import SamplingConfig
from tgen.generation.constrained import Grammars

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
FORMS = {
    "date": {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    "sentence": {"regex": r"[A-Z][a-z]{1,12}( [a-z]{1,12}){2,9}\."},
    "schema": {"json_schema": SCHEMA},
}


def with_llguidance(tokens: list[bytes], form: dict[str, str], pick: Callable) -> list[float]:
    """Seconds: of compiling, then of each token."""
    grammars = Grammars(tokens, [], lambda data: [tokens.index(bytes([byte])) for byte in data])
    began = time.perf_counter()
    matcher = grammars.matcher(SamplingConfig(**form))
    times = [time.perf_counter() - began]
    while not matcher.over and len(times) < 400:
        began = time.perf_counter()
        allowed = matcher.allowed(len(tokens))
        times.append(time.perf_counter() - began)
        matcher.accept(pick(np.flatnonzero(allowed).tolist()))
    return times


def with_outlines(tokens: list[bytes], form: dict[str, str], pick: Callable) -> list[float]:
    """The same."""
    ids: dict[bytes, list[int]] = {}
    for i, token in enumerate(tokens):
        if token:
            ids.setdefault(token, []).append(i)
    vocabulary = outlines_core.Vocabulary(len(tokens), ids)
    began = time.perf_counter()
    regex = form.get("regex") or build_regex_from_schema(form["json_schema"])
    guide = outlines_core.Guide(outlines_core.Index(regex, vocabulary))
    times = [time.perf_counter() - began]
    while not guide.is_finished() and len(times) < 400:
        began = time.perf_counter()
        allowed = guide.get_tokens()
        times.append(time.perf_counter() - began)
        going = [token for token in allowed if token < len(tokens)]
        if not going:
            break
        guide.advance(pick(going))
    return times


def vocabularies() -> dict[str, list[bytes]]:
    """The shipped model's, and one of 50,000 pieces of its words."""
    bundle = model_dir.load(shipped_model())
    small = [bundle.tokenizer.token_bytes(i) for i in range(bundle.tokenizer.vocab_size)]
    chosen, large = random.Random(0), set(small)
    while len(large) < 50_000:
        large.add(b"".join(chosen.choices(small, k=2))[:16])
    return {"1,024": small, "50,000": [*small, *sorted(large - set(small))]}


def _measure(arguments: argparse.Namespace) -> None:
    content, results = record.origin(), []
    libraries = ("llguidance: compile", "a token", "outlines-core: compile", "a token")
    rows = [["form", "vocabulary", *libraries]]
    for size, tokens in vocabularies().items():
        for name, form in FORMS.items():
            found = {}
            for library, run in (("llguidance", with_llguidance), ("outlines-core", with_outlines)):
                chosen = random.Random(1)
                turns = [run(tokens, form, chosen.choice) for _ in range(arguments.rounds)]
                found[library] = {
                    "compile_ms": 1000 * statistics.median(turn[0] for turn in turns),
                    "token_ms": 1000 * statistics.mean(t for turn in turns for t in turn[1:]),
                }
            results.append({"form": name, "vocabulary": size, **found})
            cells = [f"{value:,.3f} ms" for one in found.values() for value in one.values()]
            rows.append([name, size, *cells])
    versions = {name: version(name) for name in ("llguidance", "outlines-core")}
    record.write(
        arguments.out or record.RESULTS / "constraints.json",
        content | {"versions": versions, "results": results},
    )
    print(record.table(rows))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    _measure(parser.parse_args())


if __name__ == "__main__":
    main()
