"""Stop strings, found in bytes: what could still become one is held back."""

from collections.abc import Sequence


class Stopper:
    """A text as it comes. Nothing of a stop string is ever let through."""

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = b""
        self.stopped = False

    def feed(self, piece: bytes) -> bytes:
        """What can be shown now; after a stop string nothing more."""
        if self.stopped:
            return b""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], b""
            return shown
        n = max((self._begun(stop) for stop in self._stops), default=0)
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
