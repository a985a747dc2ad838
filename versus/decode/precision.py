"""Compare what fewer bits per weight cost, in bits per byte of a text, in tgen and in llama.cpp.

    python -m versus.decode.precision validation.txt

Both predict the same windows of the text with the same weights; llama.cpp quantizes the matrices as
Q8_0 and Q4_0, tgen as int8 and int4. Without llama-cpp-python, llama.cpp is skipped.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tgen.benchmark.other_engines import OTHER_ENGINES
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.checkpoint.model_dir import load
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import EngineOptions, GgufType, StoredAs
from tgen.engine.base import Logits
from tgen.engine.open_engine import open_engine
from tgen.generation.logprobs import block_nll, predictions
from versus import harness

TYPES: dict[StoredAs, GgufType] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "int8": "q8_0",
    "int4": "q4_0",
}


def tgen_nll(path: Path, dtype: StoredAs, windows: Sequence[list[int]]) -> float:
    """Return the nats of all ids but the first of each window."""
    engine = open_engine(
        load(path), EngineOptions(device="cpu", threads=None, dtype=dtype, kind="kernels")
    )
    nats = 0.0
    for window in windows:
        for logits, targets in predictions(engine, window, 1):
            nats += block_nll(logits, targets)
    return nats


def llama_cpp_nll(path: Path, dtype: StoredAs, windows: Sequence[list[int]]) -> float:
    """Return the nats by llama.cpp with its defaults, the matrices stored as `TYPES[dtype]`."""
    from llama_cpp import Llama

    bundle = load(path)
    length = bundle.config.context_length
    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        file = Path(folder, "model.gguf")
        write_gguf(file, bundle.config, bundle.arrays, stored=TYPES[dtype])
        model = Llama(str(file), n_ctx=length, n_batch=length, logits_all=True, verbose=False)
        nats = 0.0
        for window in windows:
            model.reset()
            model.eval(window[:-1])
            logits: Logits = np.asarray(model.scores[: len(window) - 1])
            nats += block_nll(logits, window[1:])
        model.close()
    return nats


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    bundle = load(options.model)
    tokenizer, size = bundle.tokenizer, bundle.config.context_length
    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        path = options.text or harness.write_text(Path(folder, "text.txt"), 2000)
        ids = tokenizer.encode(path.read_bytes()[: options.bytes])
    windows = [ids[start : start + size + 1] for start in range(0, len(ids) - 1, size)]
    n_bytes = sum(len(tokenizer.decode(window[1:])) for window in windows)
    engines: dict[str, Callable[..., float]] = {"tgen": tgen_nll, "llama.cpp": llama_cpp_nll}
    if any(find_spec(module) is None for module in OTHER_ENGINES["llama.cpp"]):
        harness.skip("llama.cpp", "not installed")
        del engines["llama.cpp"]
    results: dict[str, dict[str, float]] = {
        name: {dtype: nll(options.model, dtype, windows) / math.log(2) / n_bytes for dtype in TYPES}
        for name, nll in engines.items()
    }
    rows: list[list[Any]] = [["bits per byte", *engines]]
    for dtype in TYPES:
        cells = [(bits[dtype], bits[dtype] - bits["float32"]) for bits in results.values()]
        rows.append([dtype, *(f"{bits:.4f} ({more:+.4f})" for bits, more in cells)])
    harness.save(options, {"bits_per_byte": results, "tokens": len(ids), "bytes": n_bytes})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "precision.json")
    parser.add_argument("text", type=Path, nargs="?", help="a text that the model has not seen")
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--bytes", type=int, default=200_000, help="of the text's beginning")
    options = harness.parse(parser, arguments, {"bytes": 500})
    if not options.quick and options.text is None:
        parser.error("pass a text")
    harness.run(measure, options)


if __name__ == "__main__":
    main()
