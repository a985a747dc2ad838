"""Sums of scores, by units of text that vary independently: documents, or blocks of long ones."""

from array import array
from typing import NamedTuple

import numpy as np

from tgen.reports.score import Score, Unit
from tgen.reports.standard_error import bits_per_byte_error
from tgen.scoring.document_blocks import Floats

MIN_UNITS = 10  # fewer give no usable standard error


class Units(NamedTuple):
    """The scores of n units."""

    unit: Unit
    nats: Floats  # (n,)
    n_bytes: Floats  # (n,)

    @property
    def standard_error(self) -> float | None:
        """The standard error of all units' bits per byte; None for too few."""
        enough = len(self.nats) >= MIN_UNITS
        return bits_per_byte_error(self.nats, self.n_bytes) if enough else None


class ScoreTotals:
    """The sum of many scores. Documents are the units from 10 on, else their blocks."""

    def __init__(self) -> None:
        self._nats, self._bytes = array("d"), array("d")  # by document
        self._block_nats, self._block_bytes = array("d"), array("d")
        self._n_bytes = self._n_tokens = 0

    def add(self, nats: float, *, n_bytes: int, n_tokens: int, blocks: Floats) -> None:
        """Add a document; `blocks` (n,) are the nats of its equal parts."""
        self._n_bytes += n_bytes
        self._n_tokens += n_tokens
        if n_bytes:
            self._nats.append(nats)
            self._bytes.append(n_bytes)
            if len(self._nats) < MIN_UNITS:
                self._block_nats.extend(blocks)
                self._block_bytes.extend([n_bytes / len(blocks)] * len(blocks))

    def units(self) -> Units:
        """Return the scores of the units."""
        if len(self._nats) >= MIN_UNITS:
            return Units("documents", np.array(self._nats), np.array(self._bytes))
        return Units("blocks", np.array(self._block_nats), np.array(self._block_bytes))

    def score(self) -> Score:
        """Return the score of all documents together."""
        units = self.units()
        return Score(
            n_bytes=self._n_bytes,
            n_tokens=self._n_tokens,
            nats=float(np.sum(self._nats)),
            standard_error=units.standard_error,
            unit=units.unit,
            n_units=len(units.nats),
        )
