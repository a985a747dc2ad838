"""Tables without lines, in which numbers are never cut and words are folded where they must be."""

from rich.table import Table
from rich.text import Text


def table(*names: str, title: str = "") -> Table:
    """Columns by name; a `>` before one says that its numbers stand to the right."""
    made = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
    )
    for name in names:
        if name.startswith(">"):
            made.add_column(name[1:], justify="right", no_wrap=True)
        else:
            made.add_column(name, overflow="fold")
    return made
