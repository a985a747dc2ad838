"""Whole processes: from the shell's command to its end, and how much memory they took.

    python benchmarks/decode/processes.py --shape 12M

`tgen generate` beside a script that does the same with transformers, taking turns, each writing
`--tokens` tokens after a short prompt. Files and kernels are warm. The shape's weights are random;
the tokenizer is learnt from tgen's own sources.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
import tgen
from shapes import SHAPES, config_of, random_arrays
from tgen.checkpoint import model_dir
from tgen.tokenizer import train_bpe

PROMPT = "The first"
TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt")
out = model.generate(**ids, max_new_tokens=int(sys.argv[3]), do_sample=False)
print(tokenizer.decode(out[0]))
"""


# A process counts the memory of the one that starts it as its own: so a small one does.
LAUNCHER = """
import os, subprocess, sys, time
began = time.perf_counter()
nothing = subprocess.DEVNULL
process = subprocess.Popen(sys.argv[1:], stdout=nothing, stderr=nothing)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - began, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def make_model(shape: str, folder: Path) -> int:
    """A model directory; bytes of its weights."""
    sources = [path.read_bytes() for path in sorted(Path(tgen.__file__).parent.rglob("*.py"))]
    tokenizer = train_bpe(sources, vocab_size=min(4096, SHAPES[shape]["vocab_size"]))
    config = config_of(shape, 2048)
    model_dir.save(folder, config, tokenizer, random_arrays(config))
    return (folder / model_dir.WEIGHTS).stat().st_size


def run(command: list[str]) -> tuple[float, int]:
    """Seconds and the largest resident size in bytes."""
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    found = subprocess.run(launcher, capture_output=True, check=True, text=True).stdout.split()
    return float(found[0]), int(found[1]) * 1024


def _measure(arguments: argparse.Namespace) -> None:
    content = record.origin()
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        folder, n = Path(name) / "model", str(arguments.tokens)
        n_bytes = make_model(arguments.shape, folder)
        ours = ["-m", "tgen", "generate", "--model", str(folder), "--prompt", PROMPT, "-n", n]
        commands = {"tgen": [sys.executable, *ours, "--temperature", "0", "--quiet"]}
        for weights in ("bfloat16", "int8"):
            commands[f"tgen, {weights}"] = [*commands["tgen"], "--weights", weights]
        commands["tgen --help"] = [sys.executable, "-m", "tgen", "--help"]
        if find_spec("transformers"):
            script = [sys.executable, "-c", TRANSFORMERS, str(folder), PROMPT, n]
            commands["transformers"] = script
        rounds = []
        for number in range(arguments.rounds + 1):
            taken = {name: run(command) for name, command in commands.items()}
            if number > 0:  # the first warms up
                rounds.append(taken)
    rows = [["", "seconds", "of tgen's", "peak MB", "of the weights' file"]]
    for name in commands:
        seconds = statistics.median(r[name][0] for r in rounds)
        times = statistics.median(r[name][0] / r["tgen"][0] for r in rounds)
        peak = statistics.median(r[name][1] for r in rounds)
        rows.append(
            [name, f"{seconds:.2f}", f"{times:.2f}", f"{peak / 1e6:.0f}", f"{peak / n_bytes:.2f}"]
        )
    record.write(
        arguments.out or record.RESULTS / f"processes_{arguments.shape}.json",
        content | {"weight_bytes": n_bytes, "tokens": arguments.tokens, "rounds": rounds},
    )
    print(record.table(rows))
    print(f"weights' file: {n_bytes / 1e6:.0f} MB")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="12M")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    _measure(parser.parse_args())


if __name__ == "__main__":
    main()
