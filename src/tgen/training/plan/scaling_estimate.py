"""What a plan comes to on many ranks: memory, messages, speed, tokens. A pure function."""

from tgen.config import ModelConfig, Parallel, TrainConfig
from tgen.reports import ScalingReport
from tgen.training.plan.budget import n_steps
from tgen.training.plan.memory_estimate import choose_parallel, rank_memory
from tgen.training.plan.model_size import (
    PlanInputs,
    flops_per_token,
    matmul_params,
    tokens_per_second,
)
from tgen.training.plan.param_shapes import block_tensors, n_parameters, size
from tgen.training.plan.plan import Plan

# torchtitan (Liang et al. 2024), Llama 3.1 8B with FSDP2 on H100s with 400 Gb/s of network each:
# 5,762 tokens a second and GPU on 8 of them, 5,605 on 128, which is 33 % of the peak.
EFFICIENCY = 0.97
GPU_SHARE = 0.33
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3: what made the best use of computation
_WAYS: tuple[Parallel, ...] = ("ddp", "fsdp")


def scaling_report(
    plan: Plan,
    facts: PlanInputs,
    *,
    n_ranks: int,
    device_memory: int | None,
    on_gpu: bool,
    text_tokens: int,
) -> ScalingReport:
    """`plan` on `n_ranks` of `device_memory` bytes each (None: not told), every rank with a batch
    of the plan's, of `text_tokens` to train on. A GPU computes in bfloat16.

    Raises UsageError where the memory is too small (`choose_parallel`).
    """
    model, train, context = plan.model, plan.train, plan.context_length
    step_tokens = n_ranks * train.batch_size * context
    efficiency = EFFICIENCY if n_ranks > 1 else 1.0
    speed = efficiency * n_ranks * tokens_per_second(facts.speed, matmul_params(model))
    gpu_speed = n_ranks * GPU_SHARE * 1e14 / flops_per_token(model)
    steps = n_steps(train, speed / step_tokens)
    parameters = n_parameters(model)
    optimal = TOKENS_PER_PARAMETER * parameters
    return ScalingReport(
        n_ranks=n_ranks,
        device_memory=device_memory,
        on_gpu=on_gpu,
        parallel=choose_parallel(
            model, train, context=context, n_ranks=n_ranks, memory=device_memory, on_gpu=on_gpu
        ),
        ranks=[
            rank_memory(model, train, context=context, n_ranks=n_ranks, parallel=way, on_gpu=on_gpu)
            for way in _WAYS
        ],
        sent_bytes={way: sent_bytes(model, train, n_ranks, way) for way in _WAYS},
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


def sent_bytes(model: ModelConfig, train: TrainConfig, n_ranks: int, parallel: Parallel) -> int:
    """What a rank sends for one step, in float32 and by rings: DDP adds gradients up and spreads
    the sums, once a step; FSDP gathers weights forward and backward and spreads gradients, once a
    part of the batch. Of Muon's matrices each goes to one rank, and comes back from it."""
    weights = n_parameters(model)
    muon = train.optimizer == "muon"
    matrices = model.n_layers * size(s for s in block_tensors(model) if len(s) == 2) * muon
    if parallel == "ddp":  # every rank has what goes there
        numbers = 2 * weights + matrices
    else:  # and here a share alone
        numbers = 3 * train.accumulation * weights + 2 * matrices // n_ranks
    return 4 * numbers * (n_ranks - 1) // n_ranks
