"""Train and generate on a fake GPU, in a process of its own, and compare with the CPU.

`python -m fake_cuda.cases GUARD [FAMILY...]` loads the library GUARD and prints the problems of
each case as JSON.
"""

import ctypes
import itertools
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

guard = ctypes.CDLL(sys.argv[1])  # before torch looks for CUDA

import torch

guard.set_guard()

from torch.utils._python_dispatch import _disable_current_modes

from fake_cuda.device import GPU, Device, fake_gpu
from support.families import DISTINCT
from support.models import VARIED
from support.models import make_model as make_any_model
from tgen.checkpoint.dtypes import to_bfloat16
from tgen.config import FAMILIES, SamplingConfig, StoredAs
from tgen.config.training import Precision, ResolvedTrainConfig
from tgen.corpus import Batch, PackedRows, TokenDataset, Tokens
from tgen.engine import cuda_graph
from tgen.engine.torch_engine import TorchEngine
from tgen.generation.loop import compute_prompt_cache, generate, generate_requests, make_source
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.sequence import Request
from tgen.generation.vocabulary import Vocabulary
from tgen.lora.matrices import NewAdapter, adapter_layout, new_shapes
from tgen.model.transformer import Transformer
from tgen.reports.training import EvalReport, StepReport
from tgen.training import loop
from tgen.training.state import TrainState, new_state

V, T = 64, 24
CPU = torch.device("cpu")
Problems = list[str]


class Batches:
    """Windows without a loss mask at even steps, packed documents with one at odd steps."""

    context_length, val_bytes = T, 2 * T

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        ids, mask = random.integers(V, size=200, dtype=np.uint16), random.random(200) < 0.6
        self.val = Tokens(ids[: 2 * T])
        shape: dict[str, Any] = dict(context_length=T, batch_size=2, seed=0, val_bytes=2 * T)
        self._plain = TokenDataset(train=Tokens(ids), val=self.val, **shape)
        rows, some = (Tokens(ids[:n], mask[:n], np.full(n // 10, 10)) for n in (200, 20))
        self._packed = PackedRows(train=rows, val=some, **shape)

    def batch(self, step: int, **how: Any) -> Batch:
        return (self._packed if step % 2 else self._plain).batch(step, **how)

    def val_windows(self, max_tokens: int) -> Iterator[Batch]:
        yield from self._plain.val_windows(max_tokens)
        yield from self._packed.val_windows(max_tokens)

    train_windows = val_windows


def make_model(family: str) -> Transformer:
    """Make a small model, with two layers where they differ: each operation is slow here."""
    differ = any(name.endswith("_layers") for name in VARIED.get(family, ()))
    return make_any_model(family, vocab_size=V, n_layers=1 + differ)


def train(family: str, precision: Precision, device: Device) -> Problems:
    return run(family, precision, device)


def lora(family: str, precision: Precision, device: Device) -> Problems:
    return run(family, precision, device, with_adapter=True)


def run(
    family: str, precision: Precision, device: Device, *, with_adapter: bool = False
) -> Problems:
    """Take two steps and evaluate, with the CPU's losses; save the state and restore it."""
    config, state = new_run(family, precision, GPU, with_adapter=with_adapter)
    device.waits.clear()
    losses, expected = losses_of(config, state), cpu_losses(family, with_adapter)
    device.waits["copy to the CPU in loop.train"] -= 2  # the losses, one per report
    problems = waits_outside(device, "evaluation.window_losses", "loss.loss_and_derivatives")
    if not np.allclose(losses, expected, rtol=0, atol=1e-4 if precision == "float32" else 0.2):
        problems.append(f"losses {losses} instead of {expected}")
    problems += left_on_cpu(state)
    state.restore(state.own_arrays(), state.progress)
    return problems + left_on_cpu(state)


def left_on_cpu(state: TrainState) -> Problems:
    tensors = [*state.model.named_parameters(), *state.model.named_buffers()]
    for optimizer in state.optimizers:
        for moments in optimizer.state.values():
            tensors += moments.items()
    return [f"{name} is on the CPU" for name, tensor in tensors if not tensor.is_cuda]


@cache
def cpu_losses(family: str, with_adapter: bool) -> list[float | None]:
    with _disable_current_modes():
        return losses_of(*new_run(family, "float32", CPU, with_adapter=with_adapter))


def new_run(
    family: str, precision: Precision, where: torch.device, *, with_adapter: bool
) -> tuple[ResolvedTrainConfig, TrainState]:
    """Return a run that, in bfloat16, has what may change its losses a little."""
    model, narrow, adapter = make_model(family), precision == "bfloat16", None
    weights: dict[str, Any] = model.to_arrays()
    whole = narrow and not with_adapter
    config = ResolvedTrainConfig(
        batch_size=2,
        accumulation=1 + whole,
        steps=2,
        eval_every=2,
        precision=precision,
        optimizer="adamw" if with_adapter else "muon",
        dropout=0.1 * narrow,
        activation_checkpointing=whole,
    )
    if with_adapter:
        shapes = new_shapes(model.config, 4, 32.0, "all")
        adapter = NewAdapter(adapter_layout(model.config), shapes)
        weights = {n: to_bfloat16(a) if narrow and a.ndim == 2 else a for n, a in weights.items()}
    return config, new_state(model.config, config, where, weights=weights, adapter=adapter)


def losses_of(config: ResolvedTrainConfig, state: TrainState) -> list[float | None]:
    clock = partial(next, itertools.count(step=0.01))
    reports = list(loop.train(state.model, Batches(), config, state, clock=clock))
    assert sum(isinstance(report, StepReport) for report in reports) == 2
    return [report.loss for report in reports if isinstance(report, StepReport | EvalReport)]


def decode(family: str, precision: StoredAs, device: Device) -> Problems:
    engine = TorchEngine(make_model(family), dtype=precision, device=GPU)
    device.waits.clear()
    found, problems = [], Problems()
    for text in texts(engine):
        found.append(text)
        width = {2: 1, 4: 4}.get(len(found))
        if width is not None and engine._graphed_steps[width]._graph is None:
            problems.append(f"no graph was captured for {width} tokens")
    if precision == "float32":
        with _disable_current_modes():
            expected = list(texts(TorchEngine(make_model(family))))
        if found != expected:
            problems.append(f"texts {found} instead of {expected}")
    engine.clone().extend([[1]])
    return problems + waits_outside(
        device,
        "torch_engine._to_numpy",
        "torch_engine.TorchEngine._hidden_states",  # tokens
        "torch_engine.TorchEngine.keys_and_values",
        "kv_cache.KVCache.extend",  # positions
        "kv_cache.KVCache.restore",
        "kv_cache.KVCache.select",
        "kv_cache.PaddedRows.__init__",
        "cuda_graph.GraphedStep._capture",
        "cuda_graph.GraphedStep.step",  # tokens and positions
    )


def texts(engine: TorchEngine) -> Iterator[list[tuple[int, int]]]:
    """Yield texts with drafts, by a graph, from a prompt cache, and by a graph with drafts:
    sequences and their tokens."""
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 9], [1, 2, 3, 4, 9], [7]]
    for drafts, n in ((NgramDrafter(), 4), (None, 6)):
        sampling = SamplingConfig(max_new_tokens=n, top_p=0.9)
        tokens = generate(engine, prompts, sampling=sampling, drafts=drafts)
        yield [(token.sequence, token.id) for token in tokens]
    cache = compute_prompt_cache(engine, prompts[0], None)
    request = Request([*prompts[0], 5, 6], SamplingConfig(max_new_tokens=2))
    tokens = generate_requests(
        engine, make_source([request]), batch_size=1, vocabulary=Vocabulary(), prompt_cache=cache
    )
    yield [(token.sequence, token.id) for token in tokens]
    engine.select([0], [2])
    for _ in range(5):
        logits = engine.extend([[1, 2, 3]], every_position=True)
        engine.rewind([2])
    yield [(0, int(token)) for token in logits.argmax(-1)]


def waits_outside(device: Device, *functions: str) -> Problems:
    """Return the waits outside of functions that need them, and those of a captured graph."""
    return [
        f"{n} x {wait}"
        for wait, n in device.waits.items()
        if n and (wait.startswith("captured") or wait.rpartition(" in ")[2] not in functions)
    ]


def planted(device: Device) -> Problems:
    """Return the planted problems that are not found."""
    x = torch.ones(3, 3, device=GPU)
    waiting: dict[str, list[Callable[[], object]]] = {
        "_local_scalar_dense": [lambda: float(x.sum()), x[0, 0].item, lambda: bool(x.all())],
        "copy to the CPU": [x.cpu, x.tolist, lambda: torch.empty(3, 3).copy_(x)],
        "copy to the GPU": [
            lambda: torch.tensor([1], device=GPU),
            lambda: torch.ones(3).to(GPU),
            lambda: torch.ones(3).to(GPU, non_blocking=True),
            lambda: torch.ones(3).pin_memory().to(GPU),
        ],
        "index": [lambda: x[x > 0]],
        "nonzero": [x.nonzero, lambda: torch.where(x > 0)],
        "masked_select": [lambda: x.masked_select(x > 0)],
        "equal": [lambda: torch.equal(x, x)],
        "synchronize": [
            torch.cuda.synchronize,
            torch.accelerator.synchronize,
            lambda: torch.cuda.current_stream().synchronize(),
        ],
    }
    problems = []
    for kind, functions in waiting.items():
        for i, function in enumerate(functions):
            device.waits.clear()
            function()
            if device.waits != {f"{kind} in no function of tgen": 1}:
                problems.append(f"{kind} {i}: {device.waits}")
    device.waits.clear()
    torch.ones(3).pin_memory().to(GPU, non_blocking=True)
    (x * torch.tensor(2.0)).relu_().masked_fill_(x > 0, 1)[torch.arange(2, device=GPU)]
    problems += waits_outside(device)
    cpu = torch.ones(3, 3)
    for mixed in (lambda: x * cpu, lambda: x[torch.tensor([0, 1])], lambda: torch.stack([x, cpu])):
        try:
            mixed()
        except RuntimeError:
            continue
        problems.append("tensors of both devices")
    return problems


def describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/tgen/" in f.filename]
    return f"{type(error).__name__}: {str(error).splitlines()[0]:.200} at {at[-1:]}"


def main() -> None:
    warnings.simplefilter("error")
    families, problems = sys.argv[2:] or FAMILIES, dict[str, Problems]()
    runs: list[tuple[str, Precision]] = [(family, "float32") for family in families]
    runs += [(family, "bfloat16") for family in families if family in DISTINCT]
    cuda_graph._STEPS_BEFORE_CAPTURE = 3
    with fake_gpu() as device:
        problems["planted"] = planted(device)
        half = [f"float16: {problem}" for problem in decode("llama", "float16", device)]
        for case in (train, lora, decode):
            found = problems[case.__name__] = []
            for family, precision in runs:
                try:
                    new = case(family, precision, device)
                except Exception as error:
                    new = [describe(error)]
                found += [f"{family} {precision}: {problem}" for problem in new]
    problems["decode"] += half
    json.dump(problems, sys.stdout)


if __name__ == "__main__":
    main()
