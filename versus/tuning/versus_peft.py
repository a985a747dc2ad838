"""Compare LoRA training steps: PEFT with transformers' Trainer, and tgen.

    python -m versus.tuning.versus_peft [--dtype bfloat16] [--rounds 5]

The same model with random weights (the shape of SmolLM2-135M), the same adapter (rank 16 on all
matrices of the blocks), and the same rows of mixed lengths in the same order, 8 per step; only the
last two thirds of a row are targets. Each side runs in its own process, blocks of steps are
interleaved, and the peak memory is that of the process. Speeds are tokens of the rows per second;
padding does not count. The Trainer pads the rows of a step to the longest one, which is its
default; tgen packs them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgen.config import ModelConfig
from tgen.machine.memory import peak_memory_bytes
from versus import harness

SHAPES: dict[str, dict[str, Any]] = {
    "135M": dict(vocab_size=49_152, n_layers=30, d_model=576, d_ff=1536, n_heads=9, n_kv_heads=3,
                 context_length=2048, tied_embeddings=True),
    "1.1B": dict(vocab_size=32_000, n_layers=22, d_model=2048, d_ff=5632, n_heads=32, n_kv_heads=4,
                 context_length=2048, tied_embeddings=False),
    "tiny": dict(vocab_size=512, n_layers=2, d_model=32, d_ff=64, n_heads=2, n_kv_heads=1,
                 context_length=256, tied_embeddings=True),
}  # fmt: skip
RATE, RANK, ALPHA = 2e-4, 16, 32
TGEN, PEFT = "tgen", "PEFT"
_UNLIMITED = 1 << 20  # steps
_MEDIAN_LENGTH, _SPREAD = 150, 0.7  # tokens of a row, log-normal

Row = tuple[NDArray[np.int64], int]  # its tokens, and the first target


def make_rows(n: int, vocab_size: int, longest: int) -> list[Row]:
    """Return rows of random tokens with lengths as in a set of short chats."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(_MEDIAN_LENGTH), _SPREAD, n)).astype(int)
    lengths = lengths.clip(8, longest)
    return [(random.integers(vocab_size, size=size), size // 3) for size in lengths.tolist()]


def save_base(folder: Path, shape: str, dtype: str) -> Path:
    """Save a model with random weights of this shape."""
    import torch

    from tgen.checkpoint import export, model_dir
    from tgen.model.transformer import Transformer
    from tgen.tokenizer import train_char

    torch.manual_seed(0)
    config = ModelConfig.of("llama", **SHAPES[shape])
    with torch.no_grad():
        arrays = Transformer(config).to_arrays()
    tokenizer = train_char([b"abc"])
    stored: Any = "bf16" if dtype == "bfloat16" else "f32"
    contents = model_dir.build_metadata_files(config, tokenizer)
    out = folder / "base"
    out.mkdir()
    for name, content in contents.items():
        (out / name).write_bytes(content)
    bundle = model_dir.ModelBundle(out, config, tokenizer, arrays, frozenset(), ())
    export.export_transformers(
        bundle, folder / "model", stored=stored, max_shard_bytes=1 << 40, progress=lambda _: None
    )
    return folder / "model"


class PackedRows:
    """The rows of each step as one window without padding: see `training.evaluation.Batches`."""

    val_bytes = 0

    def __init__(self, rows: Sequence[Row], per_step: int) -> None:
        self.rows, self.per_step = rows, per_step
        self.context_length = max(len(ids) for ids, _ in rows)

    def batch(self, step: int, **_: Any) -> tuple[Any, Any, Any]:
        """Return the tokens, loss mask and documents of a step."""
        first = step * self.per_step
        rows = [self.rows[i % len(self.rows)] for i in range(first, first + self.per_step)]
        tokens = np.concatenate([*(ids for ids, _ in rows), [0]])
        mask = np.concatenate([np.arange(1, len(ids) + 1) >= target for ids, target in rows])
        ends = np.cumsum([len(ids) for ids, _ in rows])
        mask[ends - 1] = False  # the target of a row's last token is of the next row
        documents = np.repeat(np.arange(len(rows)), [len(ids) for ids, _ in rows])
        return tokens[None], mask[None], documents[None].astype(np.int32)


def tgen_worker(options: argparse.Namespace, wait: Callable[[], None]) -> None:
    """Take steps of `tgen train --lora`, block by block."""
    import torch

    from tgen.checkpoint import model_dir
    from tgen.config.training import ResolvedTrainConfig
    from tgen.lora.matrices import NewAdapter, adapter_layout, new_shapes
    from tgen.machine.device import set_threads
    from tgen.model.precision import computes_bfloat16
    from tgen.training.loop import train
    from tgen.training.state import new_state

    set_threads(options.threads)
    bundle = model_dir.load(options.model)
    device = torch.device("cpu")
    precise = options.dtype == "float32" or not computes_bfloat16(device)
    config = ResolvedTrainConfig(
        batch_size=1,
        lora=RANK,
        optimizer="adamw",
        learning_rate=RATE,
        weight_decay=0.0,
        precision="float32" if precise else "bfloat16",
        activation_checkpointing=options.checkpointing,
        warmup_steps=0,
        steps=_UNLIMITED,
        eval_every=_UNLIMITED,
    )
    shapes = new_shapes(bundle.config, RANK, ALPHA, "all")
    adapter = NewAdapter(adapter_layout(bundle.config), shapes)
    state = new_state(bundle.config, config, device, weights=bundle.arrays, adapter=adapter)
    rows = make_rows(options.rows, bundle.config.vocab_size, options.longest)
    del bundle
    for _ in train(state.model, PackedRows(rows, options.batch), config, state):  # type: ignore[arg-type]
        wait()


def peft_worker(options: argparse.Namespace, wait: Callable[[], None]) -> None:
    """Take steps of transformers' Trainer with PEFT's adapter, block by block."""
    import peft
    import torch
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    rows = make_rows(options.rows, model.config.vocab_size, options.longest)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, config)
    data = [
        {"input_ids": ids.tolist(), "labels": [-100] * target + ids.tolist()[target:]}
        for ids, target in rows
    ]

    def pad(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)

        def column(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([r[name] + [fill] * (longest - len(r[name])) for r in batch])

        sizes = torch.tensor([len(row["input_ids"]) for row in batch])
        mask = (torch.arange(longest) < sizes[:, None]).long()
        labels = column("labels", -100)
        return {"input_ids": column("input_ids", 0), "labels": labels, "attention_mask": mask}

    class Blocks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait()

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=_UNLIMITED,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **({"gradient_checkpointing": True} if options.checkpointing else {}),
            remove_unused_columns=False,
        )
        trainer = InOrder(
            wrapped, arguments, train_dataset=data, data_collator=pad, callbacks=[Blocks()]
        )
        trainer.train()


WORKERS = {TGEN: tgen_worker, PEFT: peft_worker}


def run_worker(options: argparse.Namespace) -> None:
    """Take `options.steps` steps per line on stdin, and write the seconds of each block."""
    lines = iter(sys.stdin.readline, "")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout
    left = 0
    began, cpu = 0.0, 0.0

    def wait() -> None:
        nonlocal left, began, cpu
        if left:
            left -= 1
            if left:
                return
        if began:
            peak = peak_memory_bytes()
            seconds, used = time.perf_counter() - began, time.process_time() - cpu
            print(json.dumps([seconds, used, peak]), file=out, flush=True)
        else:  # the first step warms up
            print("ready", file=out, flush=True)
        if not next(lines, ""):
            os._exit(0)
        left, began, cpu = options.steps, time.perf_counter(), time.process_time()

    WORKERS[options.worker](options, wait)


class Worker:
    """A process that takes blocks of steps on request."""

    def __init__(self, side: str, model: Path, options: argparse.Namespace) -> None:
        names = ("dtype", "batch", "rows", "longest", "steps", "threads")
        command = [sys.executable, "-m", "versus.tuning.versus_peft", "--worker", side]
        command += ["--model", str(model)]
        command += [w for name in names for w in (f"--{name}", str(getattr(options, name)))]
        command += ["--checkpointing"] * options.checkpointing
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT
        )
        self._read()

    def run_block(self) -> list[float]:
        """Return the wall and CPU seconds of a block of steps, and the peak memory in bytes."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        result: list[float] = json.loads(self._read())
        return result

    def close(self) -> None:
        """End the process."""
        with self.process:  # closes its pipes, at which it ends
            pass

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with status {self.process.wait()}")
        return line


def block_tokens(options: argparse.Namespace, vocab_size: int) -> Iterator[int]:
    """Yield the tokens of the rows of each block; the first step warms up."""
    sizes = [len(ids) for ids, _ in make_rows(options.rows, vocab_size, options.longest)]
    step = 1
    while True:
        first, n = step * options.batch, options.steps * options.batch
        yield sum(sizes[i % len(sizes)] for i in range(first, first + n))
        step += options.steps


def measure(options: argparse.Namespace) -> None:
    """Measure, print the table and write the results."""
    sides = [TGEN]
    if missing := [name for name in ("peft", "accelerate") if find_spec(name) is None]:
        harness.skip(PEFT, f"{' and '.join(missing)} missing")
    else:
        sides.append(PEFT)
    with tempfile.TemporaryDirectory() as folder:
        model = save_base(Path(folder), options.shape, options.dtype)
        workers = {side: Worker(side, model, options) for side in sides}
        tokens = block_tokens(options, SHAPES[options.shape]["vocab_size"])
        rates: dict[str, list[float]] = {side: [] for side in sides}
        cpu_rates: dict[str, list[float]] = {side: [] for side in sides}
        peaks: dict[str, float] = {}
        for _ in range(options.rounds):
            n = next(tokens)
            for side, worker in workers.items():
                seconds, used, peaks[side] = worker.run_block()
                rates[side].append(n / seconds)
                cpu_rates[side].append(n / used)
        for worker in workers.values():
            worker.close()
    rows = [["", "tokens/s", "tokens per CPU second", "peak memory"]]
    for side in sides:
        rate, of_cpu = statistics.median(rates[side]), statistics.median(cpu_rates[side])
        rows.append([side, f"{rate:,.0f}", f"{of_cpu:,.0f}", f"{peaks[side] / 2**30:.2f} GiB"])
    content: dict[str, Any] = {"shape": options.shape, "dtype": options.dtype, "rank": RANK}
    content |= {"tokens_per_second": rates, "tokens_per_cpu_second": cpu_rates, "peak_bytes": peaks}
    if PEFT in sides:
        ratios = [a / b for a, b in zip(rates[TGEN], rates[PEFT], strict=True)]
        speed, memory = statistics.median(ratios), peaks[TGEN] / peaks[PEFT]
        rows.append(["ratio", f"{speed:.2f}", "", f"{memory:.2f}"])
        content |= {"speed_ratio": speed, "memory_ratio": memory}
    print(harness.format_table(rows))
    harness.save(options, content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark or, with --worker, one side of it."""
    parser = harness.make_parser(__doc__, "versus_peft.json")
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved blocks per side")
    parser.add_argument("--steps", type=int, default=2, help="steps per block")
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a row at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    quick = {"shape": "tiny", "rounds": 1, "steps": 1, "rows": 16, "longest": 64, "threads": 1}
    options = harness.parse(parser, arguments, quick)
    if options.worker:
        run_worker(options)
    else:
        harness.run(measure, options)


if __name__ == "__main__":
    main()
