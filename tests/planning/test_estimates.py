"""Memory and scaling estimates against real tensors and known models."""

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from support.runs import dry_run, request
from tgen.checkpoint import model_dir
from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig, TrainConfig
from tgen.errors import UsageError
from tgen.model.attention import attend
from tgen.model.precision import product_precision
from tgen.model.transformer import Transformer
from tgen.planning.costs import block_shapes, n_elements, n_parameters, outer_shapes
from tgen.planning.memory import USABLE, activation_bytes, rank_memory
from tgen.planning.multi_gpu import EFFICIENCY, choose_parallel, sent_bytes
from tgen.reports.json_text import json_record
from tgen.runs.checkpoint_saver import CheckpointSaver
from tgen.runs.log import RunLog
from tgen.training.loss import cross_entropy
from tgen.training.state import new_state

GB = 10**9
SHAPES = [
    ("classic", {}),
    ("gpt2", {"tied_embeddings": False}),
    ("llama", {"attention_bias": True, "output_bias": True, "feed_forward_bias": True}),
    ("llama", {"n_kv_heads": 2, "tied_embeddings": False}),
    ("qwen3", {"head_dim": 24}),
]


def small(family: str, **more: object) -> ModelConfig:
    shape = dict(n_layers=3, d_model=64, n_heads=4, context_length=48) | more
    return ModelConfig.of(family, **shape, vocab_size=101)


def billions() -> ModelConfig:
    """The shape of LLaMA 7B."""
    shape = dict(n_layers=32, d_model=4096, n_heads=32, d_ff=11008, context_length=4096)
    return ModelConfig.of("llama", **shape, vocab_size=32_000, tied_embeddings=False)


@pytest.mark.parametrize(("family", "more"), SHAPES)
def test_shapes_match_the_model(family, more):
    config = small(family, **more)
    counted = outer_shapes(config) + config.n_layers * block_shapes(config)
    real = [tuple(p.shape) for p in Transformer(config).parameters()]
    assert sorted(counted) == sorted(real)
    assert n_parameters(config) == sum(p.numel() for p in Transformer(config).parameters())


def test_llama_7b_has_its_published_number_of_parameters():
    assert n_parameters(billions()) == 6_738_415_616  # as published


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(("family", "more"), SHAPES)
def test_memory_estimate_matches_a_run(family, more, optimizer):
    config, train = small(family, **more), ResolvedTrainConfig(optimizer=optimizer)
    state = new_state(config, train, torch.device("cpu"))
    x = state.model.hidden_states(torch.zeros(1, 8, dtype=torch.int64)).flatten(0, 1)
    cross_entropy(x, state.model.output_weight, torch.ones(8, dtype=torch.int64)).backward()
    for each in state.optimizers:
        each.step()
    parameters = list(state.model.parameters())
    moments = [
        tensor
        for each in state.optimizers
        for tensors in each.state.values()
        for tensor in tensors.values()
        if tensor.dim() > 0  # without AdamW's step counters
    ]
    estimate = rank_memory(config, train, context=48, n_ranks=1, parallel="ddp", on_gpu=False)
    assert estimate.weights == sum(p.nbytes for p in parameters)
    assert estimate.gradients == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    assert estimate.optimizer == sum(tensor.nbytes for tensor in moments)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_memory_estimate_covers_a_save(family, optimizer, tokenizer, tmp_path):
    size = {"d_model": 256, "n_heads": 4, "n_layers": 4, "context_length": 48}
    config = ModelConfig.of(family, vocab_size=tokenizer.vocab_size, **size)
    train = ResolvedTrainConfig(optimizer=optimizer, batch_size=1)
    state = new_state(config, train, torch.device("cpu"))
    loss = state.model(torch.zeros(1, 8, dtype=torch.int64)).square().mean()
    loss.backward()
    for each in state.optimizers:
        each.step()
    tracemalloc.start()
    try:
        save = partial(model_dir.save, tmp_path, config, tokenizer, state.copy_weights())
        saver = CheckpointSaver(tmp_path, RunLog(None), run_id="1", environment={}, keep=2)
        progress = dataclasses.asdict(state.progress)
        assert not list(saver.save(progress, state.own_arrays, state.n_bytes, save))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    estimate = rank_memory(config, train, context=48, n_ranks=1, parallel="ddp", on_gpu=False)
    assert 0.9 < peak / estimate.saving < 1.1
    assert estimate.total >= estimate.weights + estimate.optimizer + estimate.saving


@pytest.mark.parametrize("context", [48, 300])
@pytest.mark.parametrize(("documents", "dropout"), [(False, 0.0), (True, 0.1)])
@pytest.mark.parametrize(("family", "more"), SHAPES)
def test_activation_estimate_is_slightly_above_what_a_pass_stores(
    family, more, documents, dropout, context
):
    config, rows = small(family, **more, n_layers=8, context_length=context), 8
    model = Transformer(config, dropout=dropout)
    ours = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    stored: dict[int, torch.Tensor] = {}  # kept alive, so that addresses are unique

    def store(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    starts = None
    if documents:
        starts = (torch.arange(context) >= 20).long().expand(rows, context).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        model.hidden_states(torch.zeros(rows, context, dtype=torch.int64), documents=starts)
    n_bytes = sum(t.untyped_storage().nbytes() for at, t in stored.items() if at not in ours)
    train = ResolvedTrainConfig(batch_size=rows, dropout=dropout)
    estimate = activation_bytes(config, train, context=context, on_gpu=False)
    assert 0.65 < n_bytes / estimate < 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_attention_weights_of_more_heads_are_counted_exactly(precision):
    layers, rows, context = 3, 2, 256

    def stored_bytes(n_heads: int) -> int:
        sizes: list[int] = []
        inputs = torch.zeros(3, rows, n_heads, context, 64 // n_heads, requires_grad=True)
        store = torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes), id)
        with store, product_precision(precision):
            attend(*inputs, mask=None, scale=None)
        return sum(sizes)

    def estimate(n_heads: int) -> int:
        config = small("llama", n_layers=layers, n_heads=n_heads, context_length=context)
        train = ResolvedTrainConfig(batch_size=rows, precision=precision)
        return activation_bytes(config, train, context=context, on_gpu=False)

    of_a_layer = stored_bytes(8) - stored_bytes(4)
    assert estimate(8) - estimate(4) == (layers + 1) * of_a_layer > 0


def test_fsdp_divides_memory_by_the_ranks():
    config, train = billions(), ResolvedTrainConfig(batch_size=1)
    replica, shard = (
        rank_memory(config, train, context=4096, n_ranks=64, parallel=parallel, on_gpu=True)
        for parallel in ("ddp", "fsdp")
    )
    assert shard.activations == replica.activations
    assert shard.copies < replica.copies / 3  # of a few blocks, not of all
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(replica, name) == 64 * getattr(shard, name)  # 64 divides all rows
    assert replica.gradients == replica.weights == 4 * n_parameters(config)
    assert replica.optimizer < 1.1 * replica.weights  # Muon has one moment
    # Rank 0 gathers the weights for the model; it copies its part of the state into RAM, too.
    assert shard.saving == replica.weights + shard.weights + shard.optimizer
    assert replica.saving == replica.weights + replica.optimizer
    adamw = dataclasses.replace(train, optimizer="adamw")
    both = rank_memory(config, adamw, context=4096, n_ranks=64, parallel="ddp", on_gpu=True)
    assert both.optimizer == 2 * both.weights
    assert both.update == 0


def test_estimates_agree_with_measurements_of_torchtitan():
    # Llama 3.1, AdamW; benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 3, in GiB
    def gib(n_ranks: int, context: int, batch_size: int = 1, **more: object) -> float:
        shape: dict[str, Any] = {
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "d_ff": 14336,
        } | more
        shape |= {"vocab_size": 128_256, "n_kv_heads": 8, "context_length": context}
        config = ModelConfig.of("llama", tied_embeddings=False, **shape)
        train = ResolvedTrainConfig(optimizer="adamw", batch_size=batch_size)
        train = dataclasses.replace(train, activation_checkpointing=True)
        values = {"n_ranks": n_ranks, "parallel": "fsdp", "on_gpu": True}
        return rank_memory(config, train, context=context, **values).total / 2**30

    assert gib(8, 32768) == pytest.approx(83.9, rel=0.2)
    assert gib(8, 8192, 2) - gib(128, 8192, 2) == pytest.approx(82.4 - 67.0, rel=0.2)
    # The 70B model was trained on 64 A100s with 80 GiB each (docs/performance.md).
    assert gib(64, 8192, d_model=8192, n_layers=80, n_heads=64, d_ff=28672) < USABLE * 80


@pytest.mark.parametrize(("family", "more"), SHAPES)
def test_largest_shard_is_that_of_rank_zero(family, more):
    config = small(family, **more)  # fully_shard gives rank 0 the first chunk
    shares = sum(p.chunk(6)[0].nbytes for p in Transformer(config).parameters())
    values = dict(context=48, n_ranks=6, parallel="fsdp", on_gpu=False)
    assert rank_memory(config, ResolvedTrainConfig(), **values).weights == shares


def chosen(memory: int | None, n_ranks: int = 64, **more: object) -> str:
    train = ResolvedTrainConfig(batch_size=1)
    values = dict(context=4096, n_ranks=n_ranks, memory=memory, on_gpu=True)
    return choose_parallel(billions(), train, **values | more)


def test_fsdp_is_chosen_only_if_ddp_does_not_fit():
    assert chosen(None) == "ddp"
    assert chosen(None, wanted="fsdp") == "fsdp"
    assert chosen(1000 * GB) == chosen(1000 * GB, n_ranks=1) == "ddp"
    assert chosen(80 * GB) == "fsdp"
    assert chosen(1000 * GB, wanted="fsdp") == "fsdp"


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(UsageError) as error:
        call()
    return error.value.message, error.value.hint


def test_error_names_the_memory_needed_and_a_remedy():
    message, hint = refused(lambda: chosen(80 * GB, wanted="ddp"))
    assert "with DDP, but only 90% of 80.0 GB can be used" in message
    assert hint == "use --parallel fsdp, which fits"
    message, hint = refused(lambda: chosen(80 * GB, n_ranks=2))
    assert "each rank (of 2) needs" in message
    assert "with FSDP" in message
    on_two, remedy = refused(lambda: chosen(80 * GB, wanted="hsdp", n_local=2))
    assert on_two == message.replace("(of 2)", "(of 64)").replace("FSDP", "HSDP")
    assert remedy == "use --parallel fsdp, which fits"
    enough = int(hint.split()[1])
    assert chosen(80 * GB, n_ranks=enough) == "fsdp"
    assert chosen(80 * GB, wanted="hsdp", n_local=enough) == "hsdp"
    refused(lambda: chosen(80 * GB, n_ranks=enough // 2))
    assert "accumulation" in refused(lambda: chosen(16 * GB))[1]


def test_memory_per_rank_falls_with_the_ranks():
    train = ResolvedTrainConfig(batch_size=1)
    totals = [
        rank_memory(
            billions(), train, context=4096, n_ranks=2**n, parallel="fsdp", on_gpu=True
        ).total
        for n in range(10)
    ]
    assert all(b < a for a, b in pairwise(totals))


def test_sent_bytes_match_ring_collectives():
    weights, train = 4 * n_parameters(billions()), ResolvedTrainConfig(optimizer="adamw")
    assert sent_bytes(billions(), train, 1, "ddp") == sent_bytes(billions(), train, 1, "fsdp") == 0
    assert sent_bytes(billions(), train, 2, "ddp") == weights
    assert sent_bytes(billions(), train, 64, "fsdp") == 3 * 63 * weights // 64
    parts = dataclasses.replace(train, accumulation=4)
    assert sent_bytes(billions(), parts, 2, "ddp") == weights
    assert sent_bytes(billions(), parts, 2, "fsdp") == 4 * sent_bytes(billions(), train, 2, "fsdp")
    blocks = weights - 4 * n_elements(outer_shapes(billions()))
    on_gpu = sent_bytes(billions(), train, 2, "fsdp", on_gpu=True)
    assert on_gpu == sent_bytes(billions(), train, 2, "fsdp") - blocks // 2
    muon = dataclasses.replace(train, optimizer="muon")
    assert 1.4 * weights < sent_bytes(billions(), muon, 2, "ddp") < 1.5 * weights


LARGE = {
    "context_length": "16",
    "d_model": "4096",
    "n_layers": "32",
    "n_heads": "32",
    "batch_size": "2",
}


def large(tmp_path, **more):
    """A dry run of over six billion parameters."""
    return request(tmp_path, overrides=LARGE, train=TrainConfig(steps=9), **more)


def test_dry_run_of_a_huge_model_allocates_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tgen.runs.prepare.new_state", None)
    shown = dry_run(large(tmp_path, n_ranks=64, device_memory=80 * GB))
    assert shown.n_parameters > 6e9
    assert shown.scaling is not None
    scaling = shown.scaling
    assert (scaling.parallel, scaling.batch_size, scaling.step_tokens) == ("fsdp", 128, 128 * 16)
    assert (scaling.steps, scaling.tokens) == (9, 9 * 128 * 16)
    assert scaling.tokens_per_parameter == scaling.tokens / shown.n_parameters
    assert scaling.epochs == scaling.tokens / shown.train_tokens  # the corpus is used completely
    assert scaling.optimal_tokens == 20 * shown.n_parameters
    assert scaling.seconds * scaling.tokens_per_second == pytest.approx(scaling.tokens)
    assert [rank.parallel for rank in scaling.ranks] == list(scaling.sent_bytes) == ["ddp", "fsdp"]
    assert json.loads(json.dumps(json_record(shown)))["scaling"]["ranks"][0]["weights"] > 24e9
    with pytest.raises(UsageError, match=r"needs .* GB with FSDP, but only 90% of 80.0 GB"):
        dry_run(large(tmp_path, n_ranks=2, device_memory=80 * GB))
    monkeypatch.setattr("tgen.runs.prepare.memory_bytes", {torch.device("cpu"): 80 * GB}.get)
    with pytest.raises(UsageError, match="training needs about"):  # on this machine
        dry_run(large(tmp_path))


def test_ranks_are_slightly_slower_than_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tgen.runs.prepare.measure_speed", lambda *_, **__: 1e11)
    one = dry_run(request(tmp_path, n_ranks=1)).scaling
    many = dry_run(request(tmp_path, n_ranks=10)).scaling
    assert one is not None
    assert many is not None
    assert many.tokens_per_second == pytest.approx(10 * EFFICIENCY * one.tokens_per_second)
    assert (one.parallel, many.parallel, one.on_gpu) == ("ddp", "ddp", False)
    assert dry_run(request(tmp_path)).scaling is None


def test_command_prints_the_estimate(run_here, tmp_path):
    (tmp_path / "corpus.txt").write_text("What is a text? " * 300)
    small_run = ["train", "corpus.txt", "--steps", "3", "--size", "nano"]
    shown = run_here(
        *small_run, "--dry-run", "--ranks", "64", "--device-memory", "80GB", cwd=tmp_path
    )
    assert shown.returncode == 0
    assert b"64 GPUs" in shown.stdout
    assert b"with 80.0 GB each" in shown.stdout
    too_small = ["--dry-run", "--ranks", "2", "--device-memory", "1KiB"]
    refused = run_here(*small_run, *too_small, cwd=tmp_path)
    assert refused.returncode == 2
    assert b"90% of 1.0 KB can be used" in refused.stderr
    lonely = run_here(*small_run, "--ranks", "2", cwd=tmp_path)
    assert (lonely.returncode, b"--ranks needs --dry-run" in lonely.stderr) == (2, True)
    odd = run_here(*small_run, "--dry-run", "--device-memory", "lots", cwd=tmp_path)
    assert b"--device-memory: not a size (got 'lots')" in odd.stderr
    bare = run_here(*small_run, "--dry-run", "--device-memory", "80", cwd=tmp_path)
    assert (bare.returncode, b"the unit is missing (got '80')" in bare.stderr) == (2, True)
