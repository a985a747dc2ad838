"""Whether what is shown is what the model does."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tgen.reports import Check


def checks_table(checks: Sequence[Check]) -> list[Table | Text]:
    """A row a check."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("check")
    table.add_column("off by", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("")
    for check in checks:
        verdict = Text("holds") if check.holds else Text("FAILS", style="bold red")
        table.add_row(check.name, f"{check.value:.1e}", f"{check.limit:.0e}", verdict)
    n = sum(not check.holds for check in checks)
    return [table, Text(f"{n} of {len(checks)} checks fail" if n else "all checks hold")]


def footer(checks: Sequence[Check]) -> Text:
    """One line for every run."""
    wrong = [f"{check.name}: off by {check.value:.0e}" for check in checks if not check.holds]
    if wrong:
        said = f"NOT what the model does: {'; '.join(wrong)}; see --view verify"
        return Text(said, style="bold red")
    words = "; ".join(f"{check.name} within {check.value:.0e}" for check in checks)
    return Text(f"checked: {words}", style="dim")
