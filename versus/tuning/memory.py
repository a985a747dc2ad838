"""Peak memory of LoRA training steps, measured and as the plan predicts it.

    python -m versus.tuning.memory [--shape 1.1B] [--dtype bfloat16]

A process of its own takes steps of 2 x 1,024 tokens with rank 16 on all matrices of a model with
random weights, with activations stored and computed again. The plan promises a peak from 1 to 1.3
times the measured one, which is that of the process.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig
from tgen.machine.memory import peak_memory_bytes
from versus import harness
from versus.tuning.versus_peft import ALPHA, RANK, SHAPES


def run_steps(options: argparse.Namespace) -> None:
    """Take steps, and print the predicted and the measured peak in bytes."""
    import torch

    from tgen.config.training import ResolvedTrainConfig
    from tgen.corpus import TokenDataset, Tokens
    from tgen.lora.matrices import new_shapes
    from tgen.model.precision import computes_bfloat16
    from tgen.planning.memory import peak_bytes
    from tgen.runs.run_record import AdapterRecord
    from tgen.training.loop import train
    from tgen.training.state import new_state

    device = torch.device("cpu")
    model = ModelConfig.of("llama", **SHAPES[options.shape])
    arrays = make_weights(model, options.dtype)
    config = ResolvedTrainConfig(
        batch_size=2,
        lora=RANK,
        optimizer="adamw",
        precision="bfloat16" if computes_bfloat16(device) else "float32",
        activation_checkpointing=options.checkpointing,
        steps=options.steps,
        eval_every=100,
        warmup_steps=0,
    )
    shapes = new_shapes(model, RANK, ALPHA, "all")
    record = AdapterRecord(
        base="",
        base_path="",
        base_digest="",
        alpha=ALPHA,
        ranks={name: shape.rank for name, shape in shapes.items()},
        scales={name: shape.scale for name, shape in shapes.items()},
    )
    frozen = record.frozen_model(model, arrays)
    state = new_state(model, config, device, weights=arrays, adapter=record.new_adapter(model))
    del arrays
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=1 << 15).astype(np.uint16)
    dataset = TokenDataset(
        train=Tokens(tokens),
        val=Tokens(tokens[:0]),
        val_bytes=0,
        context_length=options.tokens,
        batch_size=2,
        seed=0,
    )
    for _ in train(state.model, dataset, config, state):
        pass
    state.copy_weights()  # as at a save
    predicted = peak_bytes(model, config, options.tokens, frozen)
    print(json.dumps([predicted, peak_memory_bytes()]))


def make_weights(model: ModelConfig, dtype: str) -> dict[str, NDArray[Any]]:
    """Return random matrices, as bits of bfloat16 if that is the dtype, and vectors of ones."""
    import torch

    from tgen.checkpoint.dtypes import to_bfloat16
    from tgen.model.transformer import Transformer

    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Transformer(model).state_dict().items()}
    random = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            arrays[name] = np.ones(shape, np.float32)
            continue
        arrays[name] = np.empty(shape, np.uint16 if dtype == "bfloat16" else np.float32)
        for row in range(0, len(arrays[name]), 256):
            part = arrays[name][row : row + 256]
            drawn = random.standard_normal(part.shape, np.float32) * np.float32(0.02)
            part[:] = to_bfloat16(drawn) if dtype == "bfloat16" else drawn
    return arrays


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    rows = [["activations", "predicted", "measured", "ratio"]]
    results: dict[str, Any] = {}
    for name, flags in {"stored": [], "computed again": ["--checkpointing"]}.items():
        if options.only and name != options.only:
            continue
        command = [sys.executable, "-m", "versus.tuning.memory", "--worker", *flags]
        for field in ("shape", "dtype", "tokens", "steps"):
            command += [f"--{field}", str(getattr(options, field))]
        predicted, measured = json.loads(harness.run_process(command, cwd=harness.ROOT))
        results[name] = {"predicted_bytes": predicted, "measured_bytes": measured}
        sizes = [f"{size / 2**30:.2f} GiB" for size in (predicted, measured)]
        rows.append([name, *sizes, f"{predicted / measured:.2f}"])
    print(harness.format_table(rows))
    content = {"shape": options.shape, "dtype": options.dtype, "tokens": 2 * options.tokens}
    harness.save(options, content | results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark or, with --worker, the steps."""
    parser = harness.make_parser(__doc__, "tuning_memory.json")
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each of two windows")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=("stored", "computed again"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    quick = {"shape": "tiny", "tokens": 64, "only": "computed again"}
    options = harness.parse(parser, arguments, quick)
    if options.worker:
        run_steps(options)
    else:
        harness.run(measure, options)


if __name__ == "__main__":
    main()
