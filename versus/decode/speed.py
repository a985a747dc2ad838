"""Compare tgen, transformers and llama.cpp on the same weights, interleaved.

    python -m versus.decode.speed --shape 12M
    python -m versus.decode.speed --shape 135M --dtype int8

llama.cpp needs llama-cpp-python (built on this machine, so that it uses the CPU's instructions) and
gguf; missing engines are skipped. Measured are the prefill of a prompt, decoding after a short and
a long text, and decoding of a batch; numbers in parentheses are tgen's speed relative to that
engine's. --busy runs other processes on all CPUs meanwhile.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tgen.benchmark.backend import Backend, EngineBackend, random_tokens
from tgen.benchmark.other_engines import OTHER_ENGINES, open_other_engine
from tgen.benchmark.sweep import max_logit_difference
from tgen.benchmark.trials import run_trials
from tgen.benchmark.workload import Workload
from tgen.checkpoint.model_dir import load
from tgen.config import STORED_BYTES, EngineOptions
from tgen.engine.open_engine import open_engine
from tgen.errors import TgenError
from versus import harness
from versus.decode.model_shapes import SHAPES, write_model


def open_backends(
    path: Path, options: argparse.Namespace
) -> tuple[dict[str, Backend], dict[str, float]]:
    """Open tgen and each available engine; return also their largest logit difference."""
    bundle = load(path)
    config = bundle.config
    tokens = random_tokens(config.vocab_size, config.context_length, seed=1)
    others: dict[str, Backend] = {}
    for name in OTHER_ENGINES:
        try:
            others[name] = open_other_engine(
                name, path, threads=options.threads, dtype=options.dtype, tokens=tokens
            )
        except TgenError as error:
            harness.skip(name, error.message)
    engine = open_engine(
        bundle,
        EngineOptions(device="cpu", threads=options.threads, dtype=options.dtype, kind="kernels"),
    )
    ours = EngineBackend(engine, tokens, threads=options.threads)
    prompt = Workload(n_prompt=options.prompt)
    differences = {name: max_logit_difference(ours, o, prompt) for name, o in others.items()}
    return {"tgen": ours, **others}, differences


@contextlib.contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """Keep n CPUs busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    workloads = {
        f"prefill of {options.prompt}": Workload(n_prompt=options.prompt),
        **{
            f"decode after {depth}": Workload(n_gen=options.steps, n_depth=depth)
            for depth in options.depths
        },
        f"decode, batch {options.batch}": Workload(
            n_gen=options.steps // 4, n_depth=8, batch=options.batch
        ),
    }
    n_busy = os.cpu_count() or 1 if options.busy else 0
    with tempfile.TemporaryDirectory(prefix="versus-") as folder, busy_processes(n_busy):
        context = max(options.prompt, options.steps + max(options.depths))
        write_model(options.shape, Path(folder, "model"), context_length=context)
        backends, differences = open_backends(Path(folder, "model"), options)
        keys = [(name, kind) for name in backends for kind in workloads]
        pairs = [(backends[name], workloads[kind]) for name, kind in keys]
        rounds: list[dict[str, dict[str, float]]] = []
        for trials in run_trials(pairs, trials=options.rounds):
            rates: dict[str, dict[str, float]] = {name: {} for name in backends}
            for (name, kind), trial in zip(keys, trials, strict=True):
                workload = workloads[kind]
                n_tokens = workload.batch * (workload.n_prompt + workload.n_gen)
                rates[name][kind] = n_tokens / trial.seconds
            rounds.append(rates)
    rows = [["tokens/s", *backends]]
    for kind in workloads:
        rows.append([kind])
        for name in backends:
            rate = statistics.median(r[name][kind] for r in rounds)
            ratio = statistics.median(r["tgen"][kind] / r[name][kind] for r in rounds)
            rows[-1].append(f"{rate:,.0f}" if name == "tgen" else f"{rate:,.0f} ({ratio:.2f})")
    largest = (f"{differences[name]:.1e}" if name in differences else "" for name in backends)
    rows.append(["largest logit difference", *largest])
    busy = "_busy" if options.busy else ""
    options.result = f"versus_{options.shape}_{options.dtype}{busy}.json"
    harness.save(
        options, {"rounds": rounds, "differences": differences, "threads": options.threads}
    )
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "versus_SHAPE_DTYPE.json")
    parser.add_argument("--shape", choices=list(SHAPES), default="12M")
    parser.add_argument("--dtype", choices=list(STORED_BYTES), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--depths", type=int, nargs="+", default=[16, 2048], help="tokens")
    parser.add_argument("--steps", type=int, default=64, help="decoded tokens")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--busy", action="store_true", help="run other processes on all CPUs")
    quick = {"shape": "tiny", "rounds": 1, "prompt": 32, "depths": [16], "steps": 8, "batch": 2}
    quick |= {"threads": 1}
    options = harness.parse(parser, arguments, quick)
    harness.run(measure, options)


if __name__ == "__main__":
    main()
