"""The process that reads a parquet or an Arrow file from stdin, a regular file, with little memory.

It writes one JSON list per line: the names of the columns, then the cells of each row, where
{"bytes that are not UTF-8": null} stands for such bytes. A number instead of a list is the fraction
of the file that precedes the next rows, a string says why the file cannot be read.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import ipc, parquet

from tgen.machine.resource_limit import limit_cpu_time, set_limit

_BYTES = 4 << 30  # of address space
_BATCH = 256  # rows


def main() -> None:
    """Write the rows of the file on stdin; the arguments are the seconds of CPU time that this may
    take, the kind of the file, and names of columns."""
    set_limit("RLIMIT_AS", _BYTES)
    limit_cpu_time(int(sys.argv[1]))
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    write = sys.stdout.buffer.write
    try:
        for batch in _read_batches(sys.argv[2], sys.argv[3:]):
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                write(json.dumps(row, default=_to_json).encode() + b"\n")
    except BrokenPipeError:  # the parent has read enough
        os._exit(1)
    except MemoryError:
        write(b'"it needs too much memory"\n')
    except Exception as error:  # pyarrow raises many types for damaged files
        reason = "".join(c if c.isprintable() else " " for c in str(error))[:200]
        write(json.dumps(reason).encode() + b"\n")
    sys.stdout.buffer.flush()


def _read_batches(kind: str, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    """Write the names of the columns and yield the batches of rows."""
    sys.stdin.buffer.seek(0)
    file = pa.PythonFile(sys.stdin.buffer, mode="r")
    batches: Iterable[pa.RecordBatch]
    n_rows, n_done = 0, 0
    if kind == "parquet":
        table = parquet.ParquetFile(file, memory_map=False)
        names = _choose(table.schema_arrow.names, wanted)
        batches = table.iter_batches(batch_size=_BATCH, use_threads=False, columns=names)
        n_rows = table.metadata.num_rows
    else:
        head = sys.stdin.buffer.read(6)
        sys.stdin.buffer.seek(0)
        if head.startswith(b"FEA1"):
            raise ValueError("it is Feather version 1, expected version 2 or parquet")
        if head == b"ARROW1":
            reader = ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
            names = _choose(reader.schema.names, wanted)
        else:
            batches = stream = ipc.open_stream(file)
            names = _choose(stream.schema.names, wanted)
    sys.stdout.buffer.write(json.dumps(names).encode() + b"\n")
    n_bytes = os.fstat(0).st_size
    for batch in batches:
        yield batch.select([i for i, name in enumerate(batch.schema.names) if name in names])
        n_done += batch.num_rows
        fraction = n_done / n_rows if n_rows else sys.stdin.buffer.tell() / n_bytes
        sys.stdout.buffer.write(json.dumps(float(fraction)).encode() + b"\n")


def _choose(names: list[str], wanted: list[str]) -> list[str]:
    """Return the names of the wanted columns, whatever their case; all if one is missing."""
    lower = {name.strip().lower() for name in wanted}
    chosen = [name for name in names if name in wanted or name.strip().lower() in lower]
    found = {name.strip().lower() for name in chosen}
    return chosen if chosen and found >= lower else names


def _to_json(value: Any) -> Any:
    """Return text for the bytes of text columns without a type, an object for other bytes."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return {"bytes that are not UTF-8": None}
    return str(value)


if __name__ == "__main__":
    main()
