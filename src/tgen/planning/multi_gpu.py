"""Runs on several GPUs or ranks: the choice of DDP or FSDP, and estimates of memory, communication
and speed."""

from functools import partial
from typing import Any

from tgen.config import ModelConfig
from tgen.config.training import Parallel, ResolvedTrainConfig
from tgen.errors import UsageError
from tgen.planning.budget import n_steps
from tgen.planning.costs import (
    FrozenModel,
    block_matrices,
    block_shapes,
    flops_per_token,
    n_elements,
    n_parameters,
)
from tgen.planning.memory import USABLE, rank_memory
from tgen.planning.model_size import PlanInputs
from tgen.planning.plan import Plan
from tgen.reports.number_format import format_bytes
from tgen.reports.training import ScalingReport

# torchtitan (Liang et al. 2024), Llama 3.1 8B with FSDP2 on H100s with 400 Gb/s of network each:
# 5,762 tokens per second and GPU on 8 of them, 5,605 on 128, which is 33% of the peak.
EFFICIENCY = 0.97
GPU_SHARE = 0.33
TOKENS_PER_PARAMETER = 20  # compute-optimal: Hoffmann et al. 2022, table 3
_PARALLEL: tuple[Parallel, ...] = ("ddp", "fsdp")
_MAX_RANKS = 1 << 14


def scaling_report(
    plan: Plan,
    inputs: PlanInputs,
    *,
    n_ranks: int,
    device_memory: int | None,
    on_gpu: bool,
    text_tokens: int,
) -> ScalingReport:
    """Return the estimate of `plan` on `n_ranks` of `device_memory` bytes each (None: unknown).

    Every rank takes a batch of the plan's; a GPU computes in bfloat16. `text_tokens` is the size of
    the whole training text. Raises UsageError if the memory is too small (`choose_parallel`).
    """
    model, train, context = plan.model, plan.train, plan.context_length
    step_tokens = n_ranks * train.batch_size * context
    efficiency = EFFICIENCY if n_ranks > 1 else 1.0
    speed = efficiency * n_ranks * plan.tokens_per_second
    gpu_speed = n_ranks * GPU_SHARE * 1e14 / flops_per_token(model)
    steps = n_steps(train, speed / step_tokens)
    if train.steps is None and train.max_steps is not None:  # for one rank
        steps = min(steps, -(-train.max_steps // n_ranks))
    shared: dict[str, Any] = {"context": context, "n_ranks": n_ranks, "on_gpu": on_gpu}
    shared["frozen"] = inputs.frozen
    parameters = n_parameters(model)
    optimal = TOKENS_PER_PARAMETER * parameters
    return ScalingReport(
        n_ranks=n_ranks,
        device_memory=device_memory,
        on_gpu=on_gpu,
        parallel=choose_parallel(model, train, **shared, memory=device_memory),
        ranks=[rank_memory(model, train, **shared, parallel=parallel) for parallel in _PARALLEL],
        sent_bytes={
            parallel: sent_bytes(model, train, n_ranks, parallel, on_gpu=on_gpu)
            for parallel in _PARALLEL
        },
        batch_size=n_ranks * train.batch_size,
        step_tokens=step_tokens,
        steps=steps,
        tokens=steps * step_tokens,
        tokens_per_parameter=steps * step_tokens / parameters,
        epochs=steps * step_tokens / text_tokens,
        tokens_per_second=speed,
        efficiency=efficiency,
        seconds=steps * step_tokens / speed,
        optimal_tokens_per_parameter=TOKENS_PER_PARAMETER,
        optimal_tokens=optimal,
        optimal_steps=-(-optimal // step_tokens),
        optimal_epochs=optimal / text_tokens,
        optimal_seconds=optimal / speed,
        flops_per_token=flops_per_token(model),
        gpu_share=GPU_SHARE,
        gpu_tokens_per_second=gpu_speed,
        gpu_seconds=steps * step_tokens / gpu_speed,
        gpu_optimal_seconds=optimal / gpu_speed,
    )


def choose_parallel(
    model: ModelConfig,
    train: ResolvedTrainConfig,
    *,
    context: int,
    n_ranks: int,
    n_local: int = 1,
    memory: int | None,
    on_gpu: bool,
    wanted: Parallel | None = None,
    frozen: FrozenModel | None = None,
) -> Parallel:
    """Return DDP if it fits into a rank's `memory` (bytes; None: unknown), else FSDP; HSDP, over
    the `n_local` ranks of each machine, only if `wanted`.

    Raises UsageError if neither fits, or if the `wanted` one does not.
    """
    if memory is None:
        return wanted or "ddp"

    estimate = partial(rank_memory, model, train, context=context, on_gpu=on_gpu, frozen=frozen)

    def needed(parallel: Parallel, ranks: int) -> int:
        return estimate(parallel=parallel, n_ranks=n_local if parallel == "hsdp" else ranks).total

    def fits(parallel: Parallel, ranks: int) -> bool:
        return needed(parallel, ranks) <= USABLE * memory

    candidates: list[Parallel] = ["ddp", "fsdp"] if n_ranks > 1 else ["ddp"]
    if wanted:
        candidates = [wanted]
    for parallel in candidates:
        if fits(parallel, n_ranks):
            return parallel
    if wanted in ("ddp", "hsdp") and frozen is None and n_ranks > 1 and fits("fsdp", n_ranks):
        hint = "use --parallel fsdp, which fits"
    else:
        more = 2 * n_ranks
        while more <= _MAX_RANKS and not fits("fsdp", more):
            more *= 2
        hint = (
            f"use {more:,} ranks with FSDP"
            if more <= _MAX_RANKS
            else "reduce batch_size, context_length or the model; --set accumulation=N splits a "
            "batch into micro-batches"
        )
    raise UsageError(
        f"each rank (of {n_ranks:,}) needs {format_bytes(needed(parallel, n_ranks))} with "
        f"{parallel.upper()}, but only {USABLE:.0%} of {format_bytes(memory)} can be used",
        hint,
    )


def sent_bytes(
    model: ModelConfig,
    train: ResolvedTrainConfig,
    n_ranks: int,
    parallel: Parallel,
    *,
    on_gpu: bool = False,
) -> int:
    """Return the bytes that a rank sends per step, by ring collectives.

    DDP all-reduces the gradients once per step. FSDP all-gathers the weights forward and backward
    and reduce-scatters the gradients, once per micro-batch. Each matrix of Muon goes to one rank
    and back. All are float32, but FSDP gathers the blocks in bfloat16 if it computes in bfloat16.
    """
    n_params = n_parameters(model)
    muon = model.n_layers * n_elements(block_matrices(model)) * (train.optimizer == "muon")
    if parallel == "ddp":  # every rank has the inputs, so only the results are sent
        elements = 2 * n_params + muon
    else:
        gathered = 2 * n_params
        if on_gpu or train.precision == "bfloat16":
            gathered -= model.n_layers * n_elements(block_shapes(model))
        elements = train.accumulation * (gathered + n_params) + 2 * muon // n_ranks
    return 4 * elements * (n_ranks - 1) // n_ranks
