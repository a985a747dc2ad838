"""Turn a stream of tokens into whole characters."""

import codecs


class TextStream:
    """A converter of successive tokens' bytes into whole characters, without loss.

    `feed` buffers the bytes of an incomplete character, `flush` returns them as they are. Bytes
    that can never become a character pass through.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, data: bytes) -> bytes:
        """Return all characters that are complete after `data`."""
        return self._decoder.decode(data).encode("utf-8", "surrogateescape")

    def flush(self) -> bytes:
        """Return the buffered bytes."""
        rest = self._decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
        self._decoder.reset()
        return rest
