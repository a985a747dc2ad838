"""Which tokens would complete a string."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Completions:
    """One string, looked for in all tokens once."""

    def __init__(self, text: bytes, vocabulary: Sequence[bytes]) -> None:
        self._text = text
        self._inside = self._where([text in token for token in vocabulary])
        # What begins with the rest of the string, for every way to begin it before the token.
        self._rest = {
            n: self._where([token.startswith(text[n:]) for token in vocabulary])
            for n in range(1, len(text))
        }

    def after(self, written: bytes) -> NDArray[np.int64]:
        """The tokens that, put behind `written`, complete the string."""
        found = [self._inside]
        found += [ids for n, ids in self._rest.items() if written.endswith(self._text[:n])]
        return np.unique(np.concatenate(found))

    @staticmethod
    def _where(holds: list[bool]) -> NDArray[np.int64]:
        return np.flatnonzero(holds)
