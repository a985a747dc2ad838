"""Rich tables without lines: numbers are never cut, text is folded where it must be."""

from rich.table import Table
from rich.text import Text


def table(*names: str, title: str = "") -> Table:
    """Return a table with these columns; `>` before a name right-aligns the column."""
    rows = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
    )
    for name in names:
        if name.startswith(">"):
            rows.add_column(name[1:], justify="right", no_wrap=True)
        else:
            rows.add_column(name, overflow="fold")
    return rows
