"""A run on many ranks, as rows of the plan's table."""

from tgen.reports import RankMemory, ScalingReport

_WAYS = {"ddp": "all on every rank", "fsdp": "shares of all, gathered block by block"}

# Name, seconds, from how many on.
_UNITS = (("years", 365 * 86400, 3), ("days", 86400, 2), ("hours", 3600, 2), ("minutes", 60, 2))


def scaling_table(report: ScalingReport) -> list[tuple[str, str, str]]:
    """Name, value and what it consists of or where it comes from."""
    kind = "GPUs" if report.on_gpu else "processors"
    given = report.device_memory
    each = f"of {_size(given)} each" if given else "--device-memory SIZE says what fits them"
    windows, tokens = f"{report.batch_size:,} windows", f"{report.step_tokens:,} tokens a step"
    return [
        ("ranks", f"{report.n_ranks:,} {kind}", each),
        ("global batch", windows, tokens),
        *(_memory(rank, report.sent_bytes[rank.parallel]) for rank in report.ranks),
        ("parallel", report.parallel, _WAYS[report.parallel]),
        (
            "tokens",
            _count(report.tokens),
            f"{_plain(report.tokens_per_parameter)} a parameter; {report.steps:,} steps, "
            f"{_plain(report.epochs)} epochs",
        ),
        (
            "yardstick",
            _count(report.optimal_tokens),
            f"{report.optimal_tokens_per_parameter} a parameter, as Chinchilla; "
            f"{report.optimal_steps:,} steps, {_plain(report.optimal_epochs)} epochs",
        ),
        (
            "speed",
            f"{_plain(report.tokens_per_second)} tokens/s",
            f"if a rank is as fast as this machine and so many keep {report.efficiency:.0%}; "
            f"{_time(report.seconds)}, for the yardstick {_time(report.optimal_seconds)}",
        ),
        *([_on_gpus(report)] if report.on_gpu else []),
    ]


def _on_gpus(report: ScalingReport) -> tuple[str, str, str]:
    return (
        "on GPUs",
        f"{_plain(report.gpu_tokens_per_second)} tokens/s",
        f"for each 100 TFLOP/s of one's peak, if it reaches {report.gpu_share:.0%}, at "
        f"{_plain(report.flops_per_token / 1e9)} GFLOP a token; "
        f"{_time(report.gpu_seconds)}, for the yardstick {_time(report.gpu_optimal_seconds)}",
    )


def _memory(rank: RankMemory, sent: int) -> tuple[str, str, str]:
    parts = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "moments": rank.optimizer,
        "activations": rank.activations,
        "copies": rank.copies,
        "update": rank.update,
    }
    told = " · ".join(f"{name} {_size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
    return rank.parallel, f"{_size(rank.total)} a rank", f"{told}; sends {_size(sent)} a step"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def _count(n: int) -> str:
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:,.1f} G" if n >= 1e9 else f"{n / 1e6:,.1f} M"


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _time(seconds: float) -> str:
    for unit, length, least in _UNITS:
        if seconds >= least * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"
