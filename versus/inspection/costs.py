"""Measure the cost of inspection: an HTML page, a heatmap in a terminal, memory for a long text.

    python -m versus.inspection.costs

The page has 12 layers of 12 heads (random weights, head dimension 64) and 128 tokens, and is timed
as a whole process. The memory (Linux only) is the peak RSS while a report of 1,024 tokens is
computed, above the RSS with the model alone, in a process per report.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from tgen.checkpoint import model_dir
from tgen.config import ModelConfig
from tgen.drawing.heat_map import HeatMap
from tgen.drawing.heat_map_terminal import draw_heat_map
from tgen.inspection.inspector import Inspector
from tgen.model.transformer import Transformer
from tgen.tokenizer import train_bpe
from versus import harness

_STATUS = Path("/proc/self/status")
REPORTS: dict[str, Callable[[Inspector], object]] = {
    "attention, one layer": lambda inspector: inspector.attention(
        [(1, head) for head in range(inspector.model.config.n_heads)]
    ),
    "heads, all layers": lambda inspector: inspector.heads(),
    "verify, all layers": lambda inspector: inspector.verify(),
}


def read_text() -> bytes:
    """Return tgen's own sources, three times."""
    files = sorted(Path(model_dir.__file__).parent.glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files) * 3


def measure_heatmap(n: int) -> float:
    """Return the median seconds to draw n x n blocks."""
    values = np.tril(np.random.default_rng(0).random((n, n), dtype=np.float32))
    labels = [str(i) for i in range(n)]
    heat = HeatMap(title="", values=values, rows=labels, columns=labels)
    seconds = []
    for _ in range(5):
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="truecolor", width=300
        )
        start = time.perf_counter()
        console.print(*draw_heat_map(heat, cells="block", width=300, is_terminal=True), sep="\n")
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[2]


def measure_memory(model: Path, report: str) -> float:
    """Return the MiB that a report needs above the model."""
    inspector = Inspector(model_dir.load(model), read_text(), device="cpu", tail=True)
    inspector.predictions(query=0)  # one pass of the model alone
    before = _read_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak
    REPORTS[report](inspector)
    return _read_mib("VmHWM") - before


def _read_mib(name: str) -> float:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    results: dict[str, float] = {"heatmap of 256 x 256, seconds": measure_heatmap(256)}
    text = read_text()
    tokenizer = train_bpe([text], vocab_size=options.vocab_size)
    config = ModelConfig.of("gpt2", vocab_size=tokenizer.vocab_size, **options.shape)
    with tempfile.TemporaryDirectory() as folder:
        path, page = Path(folder) / "model", Path(folder) / "page.html"
        model_dir.save(path, config, tokenizer, Transformer(config).to_arrays())
        prompt = tokenizer.decode(tokenizer.encode(text)[: options.tokens])
        command = [sys.executable, "-m", "tgen", "inspect", "-m", str(path), "--html", str(page)]
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            harness.run_process(command, input=prompt)
            seconds.append(time.perf_counter() - start)
        results["HTML page, seconds"] = sorted(seconds)[len(seconds) // 2]
        results["HTML page, MB"] = page.stat().st_size / 1e6
        for name in REPORTS if _STATUS.exists() else ():
            if options.quick:
                mib = measure_memory(path, name)
            else:
                module = [sys.executable, "-m", "versus.inspection.costs"]
                mib = float(harness.run_process([*module, "--memory", str(path), name]))
            results[f"{name}, MiB above the model"] = mib
    harness.save(options, {"results": results})
    print(harness.format_table([["", ""], *([n, f"{v:.2f}"] for n, v in results.items())]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "inspection_costs.json")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    shape = {"n_layers": 12, "n_heads": 12, "d_model": 768, "context_length": 1024}
    parser.set_defaults(rounds=3, shape=shape, vocab_size=1024, tokens=128)
    small = {"n_layers": 2, "n_heads": 2, "d_model": 32, "context_length": 64}
    options = harness.parse(
        parser, arguments, {"rounds": 1, "shape": small, "vocab_size": 300, "tokens": 32}
    )
    if options.memory:
        model, report = options.memory
        print(measure_memory(Path(model), report))
        return
    harness.run(measure, options)


if __name__ == "__main__":
    main()
