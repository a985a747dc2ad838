"""Drawing: heat maps, pages, tables and curves, for a terminal, a file or a notebook."""

from typing import Literal

Cells = Literal["auto", "num", "block", "list"]
Scale = Literal["sqrt", "linear", "log"]
