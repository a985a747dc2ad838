"""Shares of a training step's time by size and precision: Muon, products, elementwise work.

    python -m versus.learning.step_shares --sizes nano micro tiny small medium

The steps are those of `tgen train` on random tokens. Torch's profiler counts the time of each
operation without the operations that it calls. "products" are the matrix products of the model and
of the loss. Attention, Muon and AdamW include their own products. "elementwise" is everything else:
norms, rotary embedding, activations, residuals, softmax of the loss, copies, and Python.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from tgen.config import SIZES, ModelConfig
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.model.precision import computes_bfloat16
from tgen.training.machine_speed import RandomRun
from versus import harness

_PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}
_PRODUCTS |= {"mkldnn::_linear_pointwise", "aten::mkldnn_linear", "aten::_addmm_activation"}
_ATTENTION = ("scaled_dot_product", "_ChunkedAttention")
_OPTIMIZER = "optimizer: "
_VOCAB_SIZE = 1024
_WARMUP_STEPS = 3


def step_shares(size: str, step_tokens: int, precision: Precision, steps: int) -> dict[str, float]:
    """Return tokens per second without the profiler, and the share of each kind of work."""
    shape: dict[str, Any] = dict(SIZES[size])
    model = ModelConfig.of("qwen3", **shape, vocab_size=_VOCAB_SIZE, tied_embeddings=False)
    batch_size = step_tokens // model.context_length
    config = ResolvedTrainConfig(batch_size=batch_size, precision=precision)
    run = RandomRun(model, config, torch.device("cpu"))
    run.advance(_WARMUP_STEPS)
    started = time.perf_counter()
    run.advance(steps)
    seconds = time.perf_counter() - started
    for optimizer in run.state.optimizers:
        name = _OPTIMIZER + type(optimizer).__name__
        optimizer.step = _recorded(optimizer.step, name)  # type: ignore[method-assign]
    with profile() as recorded:
        run.advance(steps)
    times: dict[str, float] = defaultdict(float)
    for event in recorded.function_events or ():
        times[_kind(event)] += event.self_cpu_time_total
    total = sum(times.values())
    shares = {kind: value / total for kind, value in times.items()}
    return {"tokens_per_second": steps * step_tokens / seconds, **shares}


def _recorded(step: Any, name: str) -> Any:
    def recorded_step(**arguments: Any) -> None:
        with record_function(name):
            step(**arguments)

    return recorded_step


def _kind(event: Any) -> str:
    ancestor = event
    while ancestor is not None:
        if ancestor.name.startswith(_OPTIMIZER):
            return str(ancestor.name.removeprefix(_OPTIMIZER))
        if any(name in ancestor.name for name in _ATTENTION):
            return "attention"
        ancestor = ancestor.cpu_parent
    return "products" if event.name in _PRODUCTS else "elementwise"


def measure(options: argparse.Namespace) -> None:
    """Measure all sizes, print the table and write the results."""
    if "bfloat16" in options.precisions and not computes_bfloat16(torch.device("cpu")):
        options.precisions.remove("bfloat16")
        harness.skip("bfloat16", "this CPU does not compute it")
    kinds = ["Muon", "AdamW", "products", "attention", "elementwise"]
    rows = [["", "tokens/step", "tokens/s", *kinds]]
    runs = []
    for size in options.sizes:
        for step_tokens in options.step_tokens:
            for precision in options.precisions:
                shares = step_shares(size, step_tokens, precision, options.steps)
                runs.append({"size": size, "precision": precision, "step_tokens": step_tokens})
                runs[-1] |= shares
                cells = [f"{shares.get(kind, 0):.0%}" for kind in kinds]
                speed = f"{shares['tokens_per_second']:,.0f}"
                rows.append([f"{size}, {precision}", f"{step_tokens:,}", speed, *cells])
    harness.save(options, {"runs": runs})
    print(harness.format_table(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "step_shares.json")
    parser.add_argument("--sizes", nargs="+", default=["nano", "micro", "tiny", "small", "medium"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--steps", type=int, default=10, help="per run (default: 10)")
    quick = {"sizes": ["nano"], "precisions": ["float32"], "steps": 1}
    harness.run(measure, harness.parse(parser, arguments, quick))


if __name__ == "__main__":
    main()
