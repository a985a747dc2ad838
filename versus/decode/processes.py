"""Measure whole processes: seconds from spawn to exit, CPU seconds and peak memory.

    python -m versus.decode.processes --gguf smollm2-135m.gguf --llama-python venv/bin/python

Each row has a task; the programs that do the same task are interleaved, and the medians are shown
with the ratio of tgen's seconds and memory to each program's. Generating processes generate
`--tokens` tokens after a short prompt. Files are warm, kernels are compiled and weights are cached
in a directory of the run. The weights of the 135M rows come from --gguf, else they are random, as
all others are.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tgen.errors import TgenError
from tgen.storage.user_cache import cache_folder
from versus import harness
from versus.decode.model_shapes import write_model

PROMPT = "The first"
TASKS = (
    *("help", "shipped", "12M float32", "135M q4_1", "135M q8_0", "135M float32"),
    *("135M bfloat16", "1.1B q8_0", "kernels"),
)
QUICK = ("help", "tiny q8_0")
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}  # of the dtypes of directories
IMPORTS = "import typer, rich.console"
TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = tokenizer(sys.argv[2], return_tensors="pt")
out = model.generate(**ids, max_new_tokens=int(sys.argv[3]), do_sample=False)
print(tokenizer.decode(out[0]))
"""
LLAMA = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, verbose=False)
print(model(sys.argv[2], max_tokens=int(sys.argv[3]), temperature=0)["choices"][0]["text"])
"""
# The peak memory of a process includes that of its parent before exec, so the parent is small.
LAUNCHER = """
import os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
print(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
EMPTY_CACHE = 'XDG_CACHE_HOME=$(mktemp -d "$0/XXXXXX") exec "$@"'

Usage = tuple[float, float, float]  # seconds, CPU seconds, peak memory in bytes


def run_command(command: list[str], cache: Path) -> Usage:
    """Run a process and return what it used; it caches in the directory `cache`."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["XDG_CACHE_HOME"] = str(cache)
    launcher = [sys.executable, "-S", "-c", LAUNCHER, *command]
    seconds, cpu, peak = harness.run_process(launcher, env=environment).split()
    return float(seconds), float(cpu), float(peak) * (1 if sys.platform == "darwin" else 1024)


def make_tgen_commands(options: argparse.Namespace, *arguments: str) -> dict[str, list[str]]:
    """Return the command of this checkout, and of the other one if there is one."""
    checkouts = {"tgen": harness.ROOT, "tgen before": options.against_checkout}
    return {
        name: ["env", f"PYTHONPATH={path.resolve() / 'src'}", sys.executable, "-m", *arguments]
        for name, path in checkouts.items()
        if path is not None
    }


def make_commands(task: str, options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Write the files of a task and return the command of each program."""
    if task == "help":
        commands = make_tgen_commands(options, "tgen", "--help")
        return commands | {"imports of Typer and Rich": [sys.executable, "-c", IMPORTS]}
    if task == "kernels":
        commands = make_tgen_commands(options, "tgen.engine.cpu")
        return {name: ["sh", "-c", EMPTY_CACHE, str(folder), *c] for name, c in commands.items()}
    shape, _, kind = task.partition(" ")
    model, script = str(harness.ROOT / "models" / "shakespeare"), [PROMPT, str(options.tokens)]
    others: dict[str, list[str]] = {}
    if task != "shipped":
        is_directory = kind in GGUF_TYPES
        model = export_model(shape, kind, options, folder, gguf=not is_directory)
        if is_directory and find_spec("transformers"):
            others["transformers"] = [sys.executable, "-c", TRANSFORMERS, model, *script]
        if options.llama_python:
            gguf = export_model(shape, kind, options, folder, gguf=True)
            others["llama.cpp"] = [options.llama_python, "-c", LLAMA, gguf, *script]
    generate = ["tgen", "generate", "--model", model, "--prompt", PROMPT, "-n", script[1]]
    return make_tgen_commands(options, *generate, "--temperature", "0", "--quiet") | others


def export_model(
    shape: str, kind: str, options: argparse.Namespace, folder: Path, *, gguf: bool
) -> str:
    """Write a model as a GGUF file or a directory, and return its path."""
    source = options.gguf if options.gguf and shape == "135M" else folder / shape
    if not source.exists():
        write_model(shape, source)
    out = folder / f"{shape}-{kind}{'.gguf' if gguf else ''}"
    if not out.exists():
        command = [sys.executable, "-m", "tgen", "export", str(source), "--quiet"]
        command += ["--to", "gguf" if gguf else "transformers", "--out", str(out)]
        harness.run_process([*command, "--type", GGUF_TYPES.get(kind, kind)])
        for path in out.iterdir() if out.is_dir() else [out]:  # weights of new files are not cached
            os.utime(path, (time.time() - 3600,) * 2)
    return str(out)


def measure(options: argparse.Namespace) -> None:
    """Measure, write the results after each task, and print the table."""
    if not options.llama_python:
        harness.skip("llama.cpp", "not installed: see --llama-python")
    results: dict[str, list[dict[str, Usage]]] = {}
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        compiled, cache = cache_folder("kernels"), Path(name)
        if compiled and compiled.is_dir():
            shutil.copytree(compiled, cache / "tgen" / "kernels")
        for task in options.tasks:
            try:
                results[task] = measure_task(task, options, cache)
            except TgenError as error:
                print(f"{task}: {error.message}", file=sys.stderr)
            # Weights of other tasks leave no room for large ones within the cache's limit.
            shutil.rmtree(cache / "tgen" / "weights", ignore_errors=True)
            harness.save(options, {"tokens": options.tokens, "tasks": results})
    print_table(results)
    if len(results) < len(options.tasks):
        sys.exit(1)


def measure_task(task: str, options: argparse.Namespace, cache: Path) -> list[dict[str, Usage]]:
    """Return what each program used, in each round; raises TgenError if one fails."""
    with tempfile.TemporaryDirectory(prefix="processes-") as name:
        commands = make_commands(task, options, Path(name))
        return [
            {program: run_command(command, cache) for program, command in commands.items()}
            for _ in range(options.rounds + options.warmup)
        ][options.warmup :]


def print_table(results: dict[str, list[dict[str, Usage]]]) -> None:
    """Print a row per task and program."""
    rows = [["task: program", "seconds", "tgen's", "CPU s", "peak MiB", "tgen's"]]
    for task, rounds in results.items():
        for program in rounds[0]:
            seconds, cpu, peak = (
                statistics.median(one[program][i] for one in rounds) for i in range(3)
            )
            slower, larger = (
                statistics.median(one["tgen"][i] / one[program][i] for one in rounds)
                for i in (0, 2)
            )
            cells = [seconds, slower, cpu]
            rows.append([f"{task}: {program}", *(f"{cell:.2f}" for cell in cells)])
            rows[-1] += [f"{peak / 2**20:.0f}", f"{larger:.2f}"]
    print(harness.format_table(rows))
    print("tgen's: tgen's seconds or memory, relative to this program's")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "processes.json")
    all_tasks = dict.fromkeys((*TASKS, *QUICK))
    parser.add_argument("--tasks", nargs="+", choices=all_tasks, default=TASKS, metavar="TASK")
    parser.add_argument("--gguf", type=Path, help="GGUF file with the weights of the 135M tasks")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--llama-python",
        default=sys.executable if find_spec("llama_cpp") else None,
        help="Python interpreter that has llama-cpp-python (default: this one, if it has)",
    )
    parser.add_argument(
        "--against-checkout", type=Path, help="another checkout of tgen, measured as `tgen before`"
    )
    parser.set_defaults(warmup=1)
    quick = {"tasks": QUICK, "rounds": 1, "warmup": 0}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
