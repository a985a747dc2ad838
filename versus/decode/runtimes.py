"""Compare tgen with OpenVINO, ONNX Runtime, CTranslate2 and PyTorch, interleaved.

    python -m versus.decode.runtimes --shape 135M --dtype int8 --python openvino=VENV/bin/python
    python -m versus.decode.runtimes --model SmolLM2 --text held-out.txt --python torch=...

Engines are openvino (OpenVINO GenAI; its environment needs optimum-intel to convert models),
onnxruntime (ONNX Runtime GenAI, onnx-ir, torch, transformers), ctranslate2 (with torch and
transformers) and torch (torch.compile and torchao, with transformers): `--python` names the
interpreter of each one's environment, and engines without it, or that cannot run a dtype, are
skipped. Each engine is a process with the same weights. It greedily generates after random tokens
with its own loop, its best settings and one thread per CPU; its first token ends the prefill. In
every round, another process per engine is started: its seconds to the first token after 16, and its
peak memory after a prefill and decoding. Numbers in parentheses are tgen's speed relative to that
engine's, for seconds and bytes those of the engine relative to tgen's. `--text` adds bits per byte
of a text.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tgen.benchmark.backend import random_tokens
from tgen.checkpoint.model_dir import load
from tgen.errors import TgenError
from versus import harness
from versus.decode.model_shapes import SHAPES, write_model

WORKER = "versus.decode.runtime_worker"
ENGINES = ("openvino", "onnxruntime", "ctranslate2", "torch")
CONVERTED = ("openvino", "onnxruntime", "ctranslate2")
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
START, MEMORY = "seconds to the first token", "peak memory, MiB"


class Worker:
    """An engine's process; it is suspended while it computes nothing, since its threads spin."""

    def __init__(self, engine: str, python: str, task: str, *arguments: object) -> None:
        self.engine = engine
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if engine != "tgen":
            del environment["PYTHONPATH"]
        self.process = subprocess.Popen(
            [python, "-m", WORKER, task, engine, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=harness.ROOT,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, **request: Any) -> Any:
        """Return the reply to a request; raises TgenError if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if not reply:
            raise TgenError(f"{self.engine} failed", f"run `python -m {WORKER}` to see the error")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(reply)


def find_workers(
    options: argparse.Namespace, folder: Path, model: Path
) -> dict[str, tuple[str, Path]]:
    """Convert the model where needed; return each engine's interpreter and model path."""
    pythons = dict(option.split("=", 1) for option in options.python)
    workers = {"tgen": (sys.executable, model)}
    for engine in ENGINES:
        if engine not in pythons:
            harness.skip(engine, "not installed: see --python")
            continue
        path = model
        if engine in CONVERTED:
            # OpenVINO computes its float32 files in bfloat16 too.
            same = engine == "openvino" and options.dtype == "bfloat16"
            stored = "float32" if same else options.dtype
            path = (options.converted or folder) / engine / f"{options.name}-{stored}"
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f"{path.name}.new")
                command = [pythons[engine], "-m", WORKER, "convert", engine]
                command += [str(model), str(new), options.dtype]
                environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
                harness.run_process(command, cwd=harness.ROOT, env=environment)
                new.rename(path)
            workers[engine] = (pythons[engine], path)
        except TgenError as error:
            harness.skip(engine, error.message)
    return workers


def measure_speed(
    worker: Worker, kinds: dict[str, tuple[int, int, int]], ids: Sequence[int]
) -> dict[str, float]:
    """Return tokens per second of each workload: tokens of the prompt, new tokens, sequences."""
    rates = {}
    for kind, (n_prompt, n, batch) in kinds.items():
        times = worker.ask(prompts=[ids[:n_prompt]] * batch, n=n)
        if n == 1:
            rates[kind] = n_prompt / times[0]
        else:
            rates[kind] = batch * (n - 1) / (times[-1] - times[0])
    return rates


def measure_start(
    engine: str, python: str, path: Path, options: argparse.Namespace, ids: Sequence[int]
) -> dict[str, float]:
    """Start a process; return its seconds to the first token, and its peak memory."""
    start = time.perf_counter()
    with Worker(engine, python, "start", path, options.dtype, options.threads) as worker:
        worker.ask(prompts=[ids[:16]], n=1)
        seconds = time.perf_counter() - start
        worker.ask(prompts=[ids[: options.prompt]], n=options.steps)
        return {START: seconds, MEMORY: worker.ask()["peak"] / 2**20}


def make_windows(options: argparse.Namespace, model: Path) -> tuple[list[list[int]], int]:
    """Return windows of 512 tokens of the text, and the bytes of all but their first tokens."""
    tokenizer = load(model).tokenizer
    ids = tokenizer.encode(options.text.read_bytes()[-options.bytes :])
    windows = [ids[i : i + 513] for i in range(0, len(ids) - 1, 512)]
    return windows, sum(len(tokenizer.decode(window[1:])) for window in windows)


def cpu_flags() -> list[str]:
    """Return the instruction sets of this CPU that matter here; none if the system does not say."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return []
    return [name for name in FLAGS if name in flags]


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    options.name = options.model.stem if options.model else options.shape
    kinds = {
        f"prefill of {options.prompt}": (options.prompt, 1, 1),
        **{f"decode after {depth}": (depth, options.steps, 1) for depth in options.depths},
        f"decode, batch {options.batch}": (8, options.steps, options.batch),
    }
    with tempfile.TemporaryDirectory(prefix="runtimes-") as name, ExitStack() as stack:
        model, folder = options.model, Path(name)
        if model is None:
            model = folder / options.shape
            write_model(options.shape, model, context_length=options.context)
            for path in model.iterdir():  # packed weights of new files are not cached
                os.utime(path, (time.time() - 3600,) * 2)
        found = find_workers(options, folder, model)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        ids = random_tokens(vocab_size, max(options.prompt, *options.depths), seed=1)
        windows, n_bytes = make_windows(options, model) if options.text else ([], 0)
        workers, versions, bits = {}, {}, {}
        for engine, (python, path) in found.items():
            worker = Worker(engine, python, "run", path, options.dtype, options.threads)
            stack.enter_context(worker)
            try:
                measure_speed(worker, kinds, ids)  # the warm-up compiles
                versions[engine] = worker.ask()["version"]
                if windows:
                    bits[engine] = worker.ask(windows=windows) / math.log(2) / n_bytes
                workers[engine] = worker
            except TgenError as error:
                harness.skip(engine, f"{error.message} with {options.dtype}")
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(options.rounds):
            order = list(workers) if number % 2 else list(workers)[::-1]
            rounds.append({e: measure_speed(workers[e], kinds, ids) for e in order})
            for engine in order:
                rounds[-1][engine] |= measure_start(engine, *found[engine], options, ids)
    print(harness.format_table(make_rows(rounds, list(workers), bits)))
    options.result = f"runtimes_{options.name}_{options.dtype}.json"
    harness.save(
        options,
        {
            "threads": options.threads,
            "cpu_flags": cpu_flags(),
            "versions": versions,
            "rounds": rounds,
            "bits_per_byte": bits,
        },
    )


def make_rows(
    rounds: Sequence[dict[str, dict[str, float]]], engines: Sequence[str], bits: dict[str, float]
) -> list[list[str]]:
    """Return the table: medians, and medians of the ratios to tgen."""
    rows = [["tokens/s", *engines]]
    for kind in rounds[0]["tgen"]:
        rows.append([kind])
        for engine in engines:
            value = statistics.median(r[engine][kind] for r in rounds)
            ratios = [r["tgen"][kind] / r[engine][kind] for r in rounds]
            if kind in (START, MEMORY):
                ratios = [1 / ratio for ratio in ratios]
            shown = f"{value:,.2f}" if kind == START else f"{value:,.0f}"
            ratio = f" ({statistics.median(ratios):.2f})"
            rows[-1].append(shown + ratio * (engine != "tgen"))
    if bits:
        rows.append(["bits per byte", *(f"{bits[engine]:.4f}" for engine in engines)])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "runtimes_NAME_DTYPE.json")
    parser.add_argument("--shape", choices=list(SHAPES), default="12M", help="random weights")
    parser.add_argument("--model", type=Path, help="transformers directory instead of --shape")
    parser.add_argument("--text", type=Path, help="the model has not seen it (with --model)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], default="int8")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--converted", type=Path, help="directory that keeps converted models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64, help="decoded tokens")
    parser.add_argument("--bytes", type=int, default=16_000, help="of the text's end")
    parser.set_defaults(prompt=512, depths=[16, 2048], batch=16, context=4096)
    quick = {"shape": "tiny", "rounds": 1, "threads": 1, "prompt": 32, "depths": [16]}
    quick |= {"steps": 4, "batch": 2, "context": 64}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
