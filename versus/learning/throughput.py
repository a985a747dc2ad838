"""Compare the speed of a training step: nanoGPT's and tgen's, at nanoGPT's shape.

    python -m versus.learning.throughput NANOGPT_CHECKOUT

4 layers of width 128, 64 tokens of context, 12 windows per step, AdamW. Each side has a process of
its own, since tgen sets the allocator of its process. Blocks of steps are interleaved and compared
with nanoGPT's block of the same round. nanoGPT's step is the body of its train.py's loop, tgen's is
its training loop, advanced report by report. nanoGPT has 65 characters and the exact GELU; tgen's
vocabulary has all 256 bytes and two special tokens, and its gpt2 family uses GPT-2's tanh GELU.
Therefore tgen is also timed with nanoGPT's vocabulary and GELU.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tgen.benchmark.statistics import timing
from tgen.config import Activation, ModelConfig
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.model.precision import computes_bfloat16
from tgen.training.machine_speed import RandomRun
from versus import harness
from versus.learning import nanogpt

N_CHARACTERS = 65  # of tinyshakespeare
TGEN_VOCAB_SIZE = 258
LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
_N_TOKENS = 1_000_000
NANOGPT, TGEN, TGEN_SAME = "nanoGPT", "tgen", "tgen, same vocabulary and GELU"

RunSteps = Callable[[int], object]  # runs a number of steps


def nanogpt_steps(checkout: Path, folder: Path) -> RunSteps:
    """Return the iterations of nanoGPT's train.py, with its data loader and its recipe."""
    path = checkout / "model.py"
    tokens = np.random.default_rng(0).integers(N_CHARACTERS, size=_N_TOKENS, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")
    shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT}
    model = nanogpt.make_model(path, **shape, vocab_size=N_CHARACTERS, dropout=0.0, bias=False)
    configure_optimizers: Any = model.configure_optimizers
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which tensors it decays
        optimizer: Any = configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        x = [torch.from_numpy(data[i : i + CONTEXT].astype(np.int64)) for i in starts]
        y = [torch.from_numpy(data[i + 1 : i + 1 + CONTEXT].astype(np.int64)) for i in starts]
        return torch.stack(x), torch.stack(y)

    def run_steps(n: int) -> None:
        for _ in range(n):
            _, loss = model(*batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()  # --log_interval=1

    return run_steps


def tgen_steps(vocab_size: int, activation: Activation) -> RunSteps:
    """Return the steps of `tgen train --family gpt2 --set optimizer=adamw` at this shape."""
    model = ModelConfig.of(
        "gpt2",
        vocab_size=vocab_size,
        activation=activation,
        n_layers=LAYERS,
        n_heads=HEADS,
        d_model=WIDTH,
        context_length=CONTEXT,
    )
    cpu = torch.device("cpu")
    precision: Precision = "bfloat16" if computes_bfloat16(cpu) else "float32"  # as with --steps
    config = ResolvedTrainConfig(optimizer="adamw", batch_size=BATCH, precision=precision)
    return RandomRun(model, config, cpu).advance


@contextmanager
def worker(make_steps: Callable[[], RunSteps]) -> Iterator[Callable[[int], float]]:
    """Start a process that takes these steps; yield a function that returns their seconds."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_work, args=(make_steps, theirs), daemon=True)
    process.start()
    theirs.close()

    def run(n: int) -> float:
        ours.send(n)
        seconds: float = ours.recv()
        return seconds

    try:
        yield run
    finally:
        ours.close()
        process.join()


def _work(make_steps: Callable[[], RunSteps], connection: Connection) -> None:
    torch.manual_seed(0)
    run_steps = make_steps()
    with contextlib.suppress(EOFError, OSError):  # the benchmark has ended
        while True:
            n = connection.recv()
            start = time.perf_counter()
            run_steps(n)
            connection.send(time.perf_counter() - start)


def run_blocks(
    sides: Mapping[str, Callable[[], RunSteps]], *, blocks: int, steps: int
) -> dict[str, list[float]]:
    """Return the seconds of each block of `steps` steps, interleaved, after a warm-up block."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(make)) for name, make in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for block in range(blocks + 1):
            for name, run in workers.items():
                taken = run(steps)
                if block > 0:
                    seconds[name].append(taken)
    return seconds


def summarize(seconds: dict[str, list[float]], steps: int) -> dict[str, dict[str, float]]:
    """Return tokens per second (median, 10th and 90th percentile) and the median speed ratio."""
    n_tokens = steps * BATCH * CONTEXT
    summary = {}
    for name, values in seconds.items():
        block = timing(values)
        summary[name] = {
            "tokens_per_second": n_tokens / block.median,
            "p10": n_tokens / block.p90,
            "p90": n_tokens / block.p10,
        }
        if NANOGPT in seconds:
            pairs = zip(seconds[NANOGPT], values, strict=True)
            ratio = statistics.median(theirs / ours for theirs, ours in pairs)
            summary[name]["relative_to_nanogpt"] = ratio
    return summary


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        sides = {
            TGEN: partial(tgen_steps, TGEN_VOCAB_SIZE, "gelu_tanh"),
            TGEN_SAME: partial(tgen_steps, N_CHARACTERS, "gelu"),
        }
        if options.checkout is None:
            harness.skip("nanoGPT", "no checkout was given")
        else:
            nanogpt.check_checkout(options.checkout)
            sides = {NANOGPT: partial(nanogpt_steps, options.checkout, Path(folder)), **sides}
        if options.quick:  # the sides of tgen differ in their sizes only
            del sides[TGEN]
        seconds = run_blocks(sides, blocks=options.blocks, steps=options.steps)
    summary = summarize(seconds, options.steps)
    rows = [["", "tokens/s", "10th-90th percentile", "relative to nanoGPT"]]
    for name, row in summary.items():
        spread = f"{row['p10']:,.0f}-{row['p90']:,.0f}"
        ratio = f"{row['relative_to_nanogpt']:.2f}" if "relative_to_nanogpt" in row else ""
        rows.append([name, f"{row['tokens_per_second']:,.0f}", spread, ratio])
    runs = [
        {"side": name, "steps": options.steps, "seconds": values}
        for name, values in seconds.items()
    ]
    harness.save(options, {"runs": runs, "summary": summary})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "throughput.json")
    parser.add_argument("checkout", metavar="NANOGPT_CHECKOUT", type=Path, nargs="?")
    parser.add_argument("--blocks", type=int, default=40, help="per side (default: 40)")
    parser.add_argument("--steps", type=int, default=20, help="per block (default: 20)")
    options = harness.parse(parser, arguments, {"blocks": 1, "steps": 2})
    if options.checkout is None and not options.quick:
        parser.error("the argument NANOGPT_CHECKOUT is required without --quick")
    harness.run(measure, options)


if __name__ == "__main__":
    main()
