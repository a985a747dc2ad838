"""The table of a plan, the first row of the training data, and the estimate for many ranks."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tgen.reports.number_format import count, format_bytes, format_number
from tgen.reports.training import Forecast, PlanReport, RankMemory, RowsReport, ScalingReport

_PARALLEL = {"ddp": "a replica on every rank", "fsdp": "sharded, gathered block by block"}

# Name, seconds, smallest number that is shown in this unit.
_UNITS = (("years", 365 * 86400, 3), ("days", 86400, 2), ("hours", 3600, 2), ("minutes", 60, 2))
_PART_CHARACTERS = 400  # of the first row, from the start and the end of each part


def plan_lines(plan: PlanReport, console: Console) -> list[Table | Text]:
    """Return the plan's table, and the first row as it will be learned."""
    lines: list[Table | Text] = [_plan_table(plan)]
    if plan.rows is not None:
        lines += [Text("first row:", style="bold"), _first_row(plan.rows, console)]
    return lines


def _first_row(rows: RowsReport, console: Console) -> Text:
    """Return the row's text, tokens that are not in the loss dim or, without styles, target tokens
    in {+ +} as wdiff marks insertions."""
    styled = console.color_system is not None
    text = Text()
    for part in rows.first_row:
        shown = part.text
        if len(shown) > 2 * _PART_CHARACTERS:
            shown = f"{shown[:_PART_CHARACTERS]} ... {shown[-_PART_CHARACTERS:]}"
        if part.in_loss and not styled:
            shown = f"{{+{shown}+}}"
        text.append(shown, style=None if part.in_loss else "dim")
    return text


def _plan_table(plan: PlanReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    budget = count(plan.steps, "step") if plan.steps else f"{plan.minutes:g} min"
    shape = " · ".join(f"{name} {value}" for name, value in plan.shape.items())
    held_out = f"{plan.held_out_tokens:,} held out" if plan.held_out_tokens else "none held out"
    for name, value, why in [
        ("corpus", f"{plan.corpus_bytes:,} bytes", f"{plan.train_tokens:,} tokens, {held_out}"),
        *(_rows_lines(plan.rows) if plan.rows else ()),
        ("model", f"{plan.family}, {plan.n_parameters / 1e6:.2f} M parameters", shape),
        ("vocabulary", f"{plan.vocab_size:,} tokens", ""),
        *((choice.name, choice.value, choice.why) for choice in plan.choices),
        *([("forecast", expected_loss(plan.forecast), "at the end")] if plan.forecast else ()),
        ("time", budget, f"on {_hardware(plan)} · seed {plan.seed}"),
        ("output", plan.out, "Ctrl-C saves and stops"),
        *(scaling_table(plan.scaling) if plan.scaling else ()),
    ]:
        table.add_row(name, Text(value), Text(why))
    return table


def _rows_lines(rows: RowsReport) -> list[tuple[str, str, str]]:
    held_out = f"{rows.held_out_rows:,} held out" if rows.held_out_rows else "none held out"
    targets = count(rows.target_tokens, "target token")
    return [("rows", f"{rows.rows:,}", f"{held_out}; {targets}, answers end with {rows.end_token}")]


def _hardware(plan: PlanReport) -> str:
    threads = f"{plan.device} with {count(plan.threads, 'thread')}"
    ranks = count(plan.ranks, "rank")
    return f"{ranks} ({plan.parallel}), {threads} each" if plan.parallel else threads


def expected_loss(forecast: Forecast) -> str:
    """Return the expected loss with half the width of its interval."""
    return f"{forecast.bits_per_byte:.3f} ±{forecast.error:.3f} bits/byte"


def scaling_table(report: ScalingReport) -> list[tuple[str, str, str]]:
    """Return rows of name, value and explanation."""
    memory = report.device_memory
    devices = count(report.n_ranks, "GPU" if report.on_gpu else "CPU")
    each = (
        f"with {format_bytes(memory)} each" if memory else "set --device-memory to check what fits"
    )
    table = [
        ("ranks", devices, each),
        (
            "global batch",
            count(report.batch_size, "window"),
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
        "save in RAM": rank.saving,
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
