"""A matrix to look at, the same for every way of drawing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scale = Literal["sqrt", "linear", "log"]
LOG_LOW = 1e-4  # weights below this are as dark as 0


@dataclass(frozen=True, kw_only=True, eq=False)
class HeatMap:
    """Numbers with labels at both sides."""

    title: str  # one line
    values: NDArray[np.float32]  # (rows, columns)
    rows: Sequence[str]  # labels, printable
    columns: Sequence[str]
    row_name: str = "query"
    column_name: str = "key"
    low: float = 0.0  # drawn darkest
    high: float = 1.0  # drawn lightest
    scale: Scale = "sqrt"
    causal: bool = True  # what lies right of the diagonal cannot be, and is not drawn
    percent: bool = True  # values are shares, and written as percent
    unit: str = "how each row's token (the query) spreads its attention over the keys, in percent"

    def shades(self, values: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Values as shades from 0 to 1, for `colours.colour`; this map's where none are given."""
        values = self.values if values is None else values
        part = np.clip((values - self.low) / ((self.high - self.low) or 1), 0, 1)
        if self.scale == "sqrt":
            part = np.sqrt(part)
        elif self.scale == "log":
            part = 1 - np.log(np.maximum(part, LOG_LOW)) / np.log(LOG_LOW)
        return np.nan_to_num(np.asarray(part, np.float32))  # a check says so where they are NaN
