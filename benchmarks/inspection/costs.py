"""What looking costs: a page of all heads, a picture in a terminal, memory over a long text.

    python benchmarks/inspection/costs.py

The page is that of 12 layers of 12 heads at 128 tokens (random weights, the 12 heads 64 wide), as
the whole command, process start to end. Memory is what the process held at most while it looked at
12 heads of 1,024 tokens, above what it held with the model alone.
"""

import argparse
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

from rich.console import Console

import record
from tgen.checkpoint import model_dir
from tgen.cli.inspect.heatmap.heatmap import HeatMap
from tgen.cli.inspect.heatmap.terminal import draw_cells
from tgen.config import ModelConfig
from tgen.model.transformer import Transformer
from tgen.tokenizer import train_bpe

TEXT = ("\n".join(p.read_text() for p in sorted(Path(model_dir.__file__).parent.glob("*.py")))) * 3
MEMORY = """
import sys
from pathlib import Path
from tgen.checkpoint.model_dir import load
from tgen.inspection.inspector import Look
look = Look(load(Path(sys.argv[1])), sys.stdin.buffer.read(), device="cpu", tail=True)
assert len(look.ids) == 1024
look.model
look.predictions(query=0)  # a pass of the model by itself
def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
{looking}
print(resident("VmHWM") - before)
"""
LOOKING = {
    "attention, one layer of 12 heads": "look.attention([(5, head) for head in range(12)])",
    "heads, all layers": "look.heads()",
    "verify, all layers": "look.verify()",
}


def main() -> None:
    """Measures all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, float] = {"terminal_256_seconds": terminal(256)}
    tokenizer = train_bpe([TEXT.encode()], vocab_size=1024)
    shape = {"n_layers": 12, "n_heads": 12, "d_model": 768, "context_length": 1024}
    config = ModelConfig.of("gpt2", vocab_size=tokenizer.vocab_size, **shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model_dir.save(path, config, tokenizer, Transformer(config).to_arrays())
        text = tokenizer.decode(tokenizer.encode(TEXT.encode())[:128])
        page = Path(folder) / "page.html"
        command = [sys.executable, "-m", "tgen", "inspect", "-m", str(path), "--html", str(page)]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            subprocess.run(command, input=text, check=True, capture_output=True)
            times.append(time.perf_counter() - begin)
        found["html_12x12x128_seconds"] = sorted(times)[1]
        found["html_12x12x128_megabytes"] = page.stat().st_size / 1e6
        for name, looking in LOOKING.items():
            code = MEMORY.replace("{looking}", looking)
            done = subprocess.run(
                [sys.executable, "-c", code, str(path)],
                input=TEXT.encode(),
                check=True,
                capture_output=True,
            )
            found[f"MiB above the model, {name}"] = float(done.stdout)
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    if options.out:
        record.write(options.out, record.origin() | found)


def terminal(n: int) -> float:
    """Seconds to draw n x n blocks, the median of five."""
    values = np.tril(np.random.default_rng(0).random((n, n), dtype=np.float32))
    labels = [str(i) for i in range(n)]
    heat = HeatMap(title="", values=values, rows=labels, columns=labels)
    times = []
    for _ in range(5):
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="truecolor", width=300
        )
        begin = time.perf_counter()
        console.print(*draw_cells(heat, cells="block", width=300, is_terminal=True), sep="\n")
        times.append(time.perf_counter() - begin)
    return sorted(times)[2]


if __name__ == "__main__":
    main()
