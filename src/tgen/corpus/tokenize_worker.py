"""`python -m tgen.corpus.tokenize_worker`: one of the processes that tokenize a large text.

On stdin comes the tokenizer.json, then for each batch a table, (n, 2) int64, of how long each piece
is and whether it continues a text, and their bytes. On stdout go how many tokens each of them has,
(n,) int64, and the tokens, uint32.
"""

import struct
import sys
from typing import IO

import numpy as np

from tgen.tokenizer import Tokenizer

_LENGTH = struct.Struct("<q")  # before all that is sent


def send(stream: IO[bytes], data: bytes) -> None:
    """Writes bytes with their length."""
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """What `send` wrote; None where it is cut off, or there is no more."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (n,) = _LENGTH.unpack(head)
    data = stream.read(n)
    return data if len(data) == n else None


def main() -> None:
    """Tokenises until nothing more comes."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    rules = receive(source)
    if rules is None:
        return
    tokenizer = Tokenizer(rules.decode())
    while (table := receive(source)) is not None and (text := receive(source)) is not None:
        start, arrays = 0, []
        for length, continues in np.frombuffer(table, np.int64).reshape(-1, 2).tolist():
            piece = text[start : start + length]
            arrays.append(tokenizer.encode_array(piece, continues=bool(continues)))
            start += length
        send(target, np.array([len(ids) for ids in arrays], np.int64).tobytes())
        send(target, np.concatenate(arrays).tobytes())


if __name__ == "__main__":
    main()
