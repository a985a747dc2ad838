"""Stop strings, matched on bytes: text that may be the start of one is withheld."""

from collections.abc import Sequence


class StopStringMatcher:
    """A filter of a text, piece by piece, that lets no part of a stop string through."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = stops
        self._withheld = b""
        self.found: bytes | None = None  # the stop string that ended the text

    def feed(self, piece: bytes) -> bytes:
        """Add a piece; return what can be shown now, nothing after a stop string."""
        if self.found is not None:
            return b""
        if not self._stops:
            return piece
        text = self._withheld + piece
        # The stop string that ends first counts; of several, the one that starts first.
        matches = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._withheld = b""
            return text[:at]
        n = len(text) - max(_longest_start(stop, text) for stop in self._stops)
        self._withheld = text[n:]
        return text[:n]

    def flush(self) -> bytes:
        """Return the withheld bytes, at the end of a text without a stop string."""
        text, self._withheld = self._withheld, b""
        return text


def _longest_start(stop: bytes, text: bytes) -> int:
    """Return how many bytes at the end of `text` may be the start of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
