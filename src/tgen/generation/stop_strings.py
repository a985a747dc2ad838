"""Stop strings, found in bytes: what could still become one is held back."""

from collections.abc import Sequence


class StopStringMatcher:
    """A text as it comes. Nothing of a stop string is ever let through."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = stops
        self._held = b""
        self.found: bytes | None = None  # the stop string that ended the text

    def feed(self, piece: bytes) -> bytes:
        """What can be shown now; after a stop string nothing more."""
        if self.found is not None:
            return b""
        if not self._stops:
            return piece
        self._held += piece
        # The one that is complete first ends the text; of several there, the one that began first.
        ends = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            shown, self._held = self._held[:at], b""
            return shown
        n = max(self._begun(stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - n], self._held[len(self._held) - n :]
        return shown

    def flush(self) -> bytes:
        """The end of a text that did not come to a stop string."""
        shown, self._held = self._held, b""
        return shown

    def _begun(self, stop: bytes) -> int:
        """How many bytes at the end may be the beginning of a stop string."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
