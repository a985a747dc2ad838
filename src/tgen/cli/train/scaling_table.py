"""Table rows of the estimate for many ranks, below those of the plan."""

from tgen.reports.number_format import format_bytes, format_number
from tgen.reports.training import RankMemory, ScalingReport

_PARALLEL = {"ddp": "a replica on every rank", "fsdp": "sharded, gathered block by block"}

# Name, seconds, smallest number that is shown in this unit.
_UNITS = (("years", 365 * 86400, 3), ("days", 86400, 2), ("hours", 3600, 2), ("minutes", 60, 2))


def scaling_table(report: ScalingReport) -> list[tuple[str, str, str]]:
    """Return rows of name, value and explanation."""
    memory = report.device_memory
    devices = f"{report.n_ranks:,} {'GPU' if report.on_gpu else 'CPU'}{'s' * (report.n_ranks > 1)}"
    each = (
        f"with {format_bytes(memory)} each" if memory else "set --device-memory to check what fits"
    )
    table = [
        ("ranks", devices, each),
        (
            "global batch",
            f"{report.batch_size:,} window{'s' * (report.batch_size > 1)}",
            f"{report.step_tokens:,} tokens per step",
        ),
        *(_memory(rank, report.sent_bytes[rank.parallel]) for rank in report.ranks),
        ("parallel", report.parallel, _PARALLEL[report.parallel]),
        (
            "training tokens",
            _count(report.tokens),
            f"{format_number(report.tokens_per_parameter)} per parameter; {report.steps:,} steps, "
            f"{format_number(report.epochs)} epochs",
        ),
        (
            "compute-optimal",
            _count(report.optimal_tokens),
            f"{report.optimal_tokens_per_parameter} per parameter (Chinchilla); "
            f"{report.optimal_steps:,} steps, {format_number(report.optimal_epochs)} epochs",
        ),
        (
            "speed",
            f"{format_number(report.tokens_per_second)} tokens/s",
            f"assuming ranks as fast as this machine, {report.efficiency:.0%} scaling efficiency; "
            f"{_in_words(report.seconds)}, compute-optimal {_in_words(report.optimal_seconds)}",
        ),
    ]
    if report.on_gpu:
        gflop = format_number(report.flops_per_token / 1e9)
        table.append(
            (
                "speed on GPUs",
                f"{format_number(report.gpu_tokens_per_second)} tokens/s",
                f"per 100 TFLOP/s of a GPU's peak, assuming {report.gpu_share:.0%} of it and "
                f"{gflop} GFLOP per token; {_in_words(report.gpu_seconds)}, compute-optimal "
                f"{_in_words(report.gpu_optimal_seconds)}",
            )
        )
    return table


def _memory(rank: RankMemory, sent: int) -> tuple[str, str, str]:
    parts = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "moments": rank.optimizer,
        "activations": rank.activations,
        "copies": rank.copies,
        "update": rank.update,
        "save": rank.saving,
    }
    sizes = " · ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return (
        rank.parallel,
        f"{format_bytes(rank.total)} per rank",
        f"{sizes}; sends {format_bytes(sent)} per step",
    )


def _count(n: int) -> str:
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:,.1f} G" if n >= 1e9 else f"{n / 1e6:,.1f} M"


def _in_words(seconds: float) -> str:
    for unit, length, least in _UNITS:
        if seconds >= least * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"
