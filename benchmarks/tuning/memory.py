"""Peak memory of LoRA training steps, measured and as the plan predicts it.

    python -m benchmarks.tuning.memory [--shape 1.1B] [--dtype bfloat16]

A model with random weights is saved, and a process of its own loads it and takes two steps of
2 x 1,024 tokens with rank 16 on all matrices, with activations stored and computed again. The plan
promises a peak from 1 to 1.3 times the measured one.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.tuning.versus_peft import ALPHA, RANK, SHAPES, save_base


def run_steps(options: argparse.Namespace) -> None:
    """Take steps, and print the predicted and the measured peak in bytes."""
    import torch

    from tgen.checkpoint import model_dir
    from tgen.checkpoint.adapter import new_shapes
    from tgen.config import ResolvedTrainConfig
    from tgen.corpus import TokenDataset
    from tgen.model.product_precision import computes_bfloat16
    from tgen.runs.adapter_record import AdapterRecord
    from tgen.training.loop import train
    from tgen.training.plan.memory_estimate import peak_bytes
    from tgen.training.state import new_state

    device = torch.device("cpu")
    bundle = model_dir.load(options.model)
    model, arrays = bundle.config, bundle.arrays
    del bundle
    config = ResolvedTrainConfig(
        batch_size=2,
        lora=RANK,
        optimizer="adamw",
        precision="bfloat16" if computes_bfloat16(device) else "float32",
        activation_checkpointing=options.checkpointing,
        steps=2,
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
        train=tokens,
        val=tokens[:0],
        val_bytes=0,
        context_length=options.tokens,
        batch_size=2,
        seed=0,
    )
    for _ in train(state.model, dataset, config, state):
        pass
    state.to_arrays()  # as at a save
    predicted = peak_bytes(model, config, options.tokens, frozen)
    measured = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps([predicted, measured]))


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    rows = [["activations", "predicted", "measured", "ratio"]]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = save_base(Path(folder), options.shape, options.dtype)
        for name, flags in {"stored": [], "computed again": ["--checkpointing"]}.items():
            if options.only and name != options.only:
                continue
            command = [sys.executable, "-m", "benchmarks.tuning.memory", "--worker", *flags]
            command += ["--model", str(model), "--tokens", str(options.tokens)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=harness.ROOT)
            predicted, measured = json.loads(out.stdout)
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
    parser.add_argument("--only", choices=("stored", "computed again"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = harness.parse(parser, arguments, {"shape": "tiny", "tokens": 64})
    if options.worker:
        run_steps(options)
    else:
        harness.run(measure, options)


if __name__ == "__main__":
    main()
