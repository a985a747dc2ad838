"""Token after token becomes whole characters."""

import codecs


class TextStream:
    """Turns the bytes of token after token into whole characters, losing none.

    `feed` holds back the bytes of an unfinished character, `flush` gives them as they are. Bytes
    that can never become a character pass through.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, data: bytes) -> bytes:
        """All that is complete after `data`."""
        return self._decoder.decode(data).encode("utf-8", "surrogateescape")

    def flush(self) -> bytes:
        """What was still held back."""
        rest = self._decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
        self._decoder.reset()
        return rest
