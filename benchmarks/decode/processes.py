"""Measure whole processes: seconds from spawn to exit, and peak memory.

    python -m benchmarks.decode.processes --shape 12M

`tgen generate` and a script that does the same with transformers are interleaved; each generates
`--tokens` tokens after a short prompt. Files and kernels are warm. The weights are random.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import harness
from benchmarks.decode.model_shapes import SHAPES, write_model

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
# The peak memory of a process includes that of its parent before exec, so the parent is small.
LAUNCHER = """
import os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - start, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run_command(command: list[str]) -> tuple[float, int]:
    """Return the seconds and the peak RSS in bytes."""
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    output = harness.run_process(launcher).split()
    return float(output[0]), int(output[1]) * 1024


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        folder, n = Path(name) / "model", str(options.tokens)
        n_bytes = write_model(options.shape, folder)
        generate = [sys.executable, "-m", "tgen", "generate", "--model", str(folder)]
        generate += ["--prompt", PROMPT, "-n", n, "--temperature", "0", "--quiet"]
        commands = {"tgen": generate}
        for dtype in ("bfloat16", "int8"):
            commands[f"tgen, {dtype}"] = [*generate, "--dtype", dtype]
        commands["tgen --help"] = [sys.executable, "-m", "tgen", "--help"]
        if find_spec("transformers"):
            script = [sys.executable, "-c", TRANSFORMERS, str(folder), PROMPT, n]
            commands["transformers"] = script
        else:
            harness.skip("transformers", "not installed")
        rounds = []
        for number in range(options.rounds + options.warmup):
            results = {name: run_command(command) for name, command in commands.items()}
            if number >= options.warmup:
                rounds.append(results)
    rows = [["", "seconds", "relative to tgen", "peak MB", "relative to the weights"]]
    for name in commands:
        seconds = statistics.median(r[name][0] for r in rounds)
        ratio = statistics.median(r[name][0] / r["tgen"][0] for r in rounds)
        peak = statistics.median(r[name][1] for r in rounds)
        rows.append(
            [name, f"{seconds:.2f}", f"{ratio:.2f}", f"{peak / 1e6:.0f}", f"{peak / n_bytes:.2f}"]
        )
    options.result = f"processes_{options.shape}.json"
    harness.save(options, {"weight_bytes": n_bytes, "tokens": options.tokens, "rounds": rounds})
    print(harness.format_table(rows))
    print(f"weights: {n_bytes / 1e6:.0f} MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "processes_SHAPE.json")
    parser.add_argument("--shape", choices=list(SHAPES), default="12M")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(warmup=1)
    harness.run(
        measure, harness.parse(parser, arguments, {"shape": "tiny", "rounds": 1, "warmup": 0})
    )


if __name__ == "__main__":
    main()
