"""How fast a training step is: nanoGPT's own and tgen's, at nanoGPT's shape, in one process.

4 layers of width 128, 64 tokens of context, 12 windows a step, AdamW. Blocks of steps take turns,
and a block is compared with nanoGPT's of the same turn: a machine that slows down slows everyone
down. nanoGPT's step is the body of its train.py's loop; tgen's is its training loop, advanced
report by report. nanoGPT has 65 characters and the exact GELU; tgen's vocabulary has all 256 bytes
and two special tokens as well, and its gpt2 family GPT-2's own GELU, by tanh, which costs more. To
tell the code from its work, tgen is also timed with nanoGPT's vocabulary and GELU.

    python benchmarks/learning/throughput.py NANOGPT_CHECKOUT
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nanogpt
import record
from tgen.benchmark.statistics import timing
from tgen.config import ModelConfig, TrainConfig
from tgen.corpus import TokenDataset
from tgen.errors import TgenError, UsageError
from tgen.training.loop import train
from tgen.training.state import new_state

CHARACTERS = 65  # tinyshakespeare's
TGEN_VOCABULARY = 258
LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
_TOKENS = 1_000_000
NANOGPT, TGEN, TGEN_SAME = "nanoGPT", "tgen", "tgen, the same function"

Steps = Callable[[int], None]  # takes this many


def nanogpt_steps(checkout: Path, folder: Path) -> Steps:
    """Iterations of its train.py, with its data loader and the values of its recipe."""
    data_path = folder / "train.bin"
    _random_tokens(CHARACTERS).astype(np.uint16).tofile(data_path)
    shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT}
    path = checkout / "model.py"
    model = nanogpt.make_model(path, **shape, vocab_size=CHARACTERS, dropout=0.0, bias=False)
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it decays
        optimizer: Any = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")  # type: ignore[operator]

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(data_path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        x = [torch.from_numpy(data[i : i + CONTEXT].astype(np.int64)) for i in starts]
        y = [torch.from_numpy(data[i + 1 : i + 1 + CONTEXT].astype(np.int64)) for i in starts]
        return torch.stack(x), torch.stack(y)

    def steps(n: int) -> None:
        for _ in range(n):
            _, loss = model(*batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()  # --log_interval=1

    return steps


def tgen_steps(vocab_size: int, activation: str) -> Steps:
    """What `tgen train --family gpt2 --set optimizer=adamw` and this shape runs between reports."""
    model = ModelConfig.of(
        "gpt2",
        vocab_size=vocab_size,
        activation=activation,
        n_layers=LAYERS,
        n_heads=HEADS,
        d_model=WIDTH,
        context_length=CONTEXT,
    )
    config = TrainConfig(optimizer="adamw", batch_size=BATCH, steps=1_000_000, eval_every=1_000_000)
    state = new_state(model, config, torch.device("cpu"))
    store = TokenDataset(
        train=_random_tokens(CHARACTERS),
        held_out=np.zeros(0, np.uint16),
        held_out_bytes=0,
        context_length=CONTEXT,
        batch_size=BATCH,
        seed=0,
    )
    reports = train(state.model, store, config, state)

    def steps(n: int) -> None:
        for _ in range(n):
            next(reports)

    return steps


def measure(arms: dict[str, Steps], *, blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each block of `steps` steps; the arms take turns, a block of each to warm up."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for block in range(blocks + 1):
        for arm, take in arms.items():
            began = time.perf_counter()
            take(steps)
            if block > 0:
                seconds[arm].append(time.perf_counter() - began)
    return seconds


def summarise(seconds: dict[str, list[float]], steps: int) -> dict[str, dict[str, float]]:
    """Tokens a second at the median block and at the 10th and 90th percentile; the median of the
    ratios of blocks that ran one after another."""
    timings = {arm: timing(taken) for arm, taken in seconds.items()}
    n_tokens = steps * BATCH * CONTEXT
    return {
        arm: {
            "tokens_per_second": n_tokens / taken.median,
            "slow": n_tokens / taken.high,
            "fast": n_tokens / taken.low,
            "times_nanogpt": statistics.median(
                theirs / ours for theirs, ours in zip(seconds[NANOGPT], seconds[arm], strict=True)
            ),
        }
        for arm, taken in timings.items()
    }


def _random_tokens(n: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """(n,): a step's time does not depend on which tokens it sees."""
    return np.random.default_rng(0).integers(n, size=_TOKENS, dtype=np.uint16)


def _measure(arguments: argparse.Namespace) -> None:
    if not (arguments.checkout / "model.py").is_file():
        raise UsageError(
            f"{str(arguments.checkout)!r} is no nanoGPT checkout: it lacks model.py",
            "git clone https://github.com/karpathy/nanoGPT, and give its path",
        )
    content = record.origin()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        arms = {
            NANOGPT: nanogpt_steps(arguments.checkout, Path(folder)),
            TGEN: tgen_steps(TGEN_VOCABULARY, "gelu_tanh"),
            TGEN_SAME: tgen_steps(CHARACTERS, "gelu"),
        }
        seconds = measure(arms, blocks=arguments.blocks, steps=arguments.steps)
    summary = summarise(seconds, arguments.steps)
    rows = [["", "tokens/s", "10-90 %", "times nanoGPT"]]
    for arm, row in summary.items():
        spread = f"{row['slow']:,.0f}-{row['fast']:,.0f}"
        ratio = f"{row['times_nanogpt']:.2f}"
        rows.append([arm, f"{row['tokens_per_second']:,.0f}", spread, ratio])
    runs = [
        {"arm": arm, "steps": arguments.steps, "seconds": taken} for arm, taken in seconds.items()
    ]
    record.write(
        arguments.out or record.RESULTS / "throughput.json",
        content | {"runs": runs, "summary": summary},
    )
    print(record.table(rows))


def main() -> None:
    """Measures; an expected failure is two lines on stderr and an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", metavar="NANOGPT_CHECKOUT", type=Path)
    parser.add_argument("--blocks", type=int, default=40, help="of each (default: 40)")
    parser.add_argument("--steps", type=int, default=20, help="in a block (default: 20)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/throughput.json")
    try:
        _measure(parser.parse_args())
    except TgenError as error:
        print(f"error: {error.message}\n{error.hint}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
