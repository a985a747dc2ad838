"""Whether what is shown is what the model does."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tgen.cli.render.tables import table
from tgen.reports import Check


def checks_table(checks: Sequence[Check]) -> list[Table | Text]:
    """A row a check."""
    rows = table("check", ">off by", ">allowed", "")
    for check in checks:
        verdict = Text("holds") if check.holds else Text("FAILS", style="bold red")
        rows.add_row(check.name, f"{check.value:.1e}", f"{check.limit:.0e}", verdict)
    n = sum(not check.holds for check in checks)
    return [rows, Text(f"{n} of {len(checks)} checks fail" if n else "all checks hold")]


def footer(checks: Sequence[Check]) -> Text:
    """One line for every run."""
    wrong = [f"{check.name}: off by {check.value:.0e}" for check in checks if not check.holds]
    if wrong:
        said = f"NOT what the model does: {'; '.join(wrong)}; see --view verify"
        return Text(said, style="bold red")
    words = "; ".join(f"{check.name} within {check.value:.0e}" for check in checks)
    return Text(f"checked: {words}", style="dim")
