"""The process that reads a parquet or an Arrow file from stdin, a regular file, with little memory.

It writes one JSON list per line: the names of the columns, then the cells of each row. A string
instead says why the file cannot be read.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import ipc, parquet

_BYTES = 4 << 30  # of address space
_SECONDS, _BYTES_PER_SECOND = 60, 100_000  # of CPU time
_BATCH = 256  # rows


def main() -> None:
    """Write the rows of the file on stdin; the argument is its kind."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        seconds = _SECONDS + os.fstat(0).st_size // _BYTES_PER_SECOND
        for limit, value in ((resource.RLIMIT_AS, _BYTES), (resource.RLIMIT_CPU, seconds)):
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    write = sys.stdout.buffer.write
    try:
        for batch in _read_batches(sys.argv[1]):
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


def _read_batches(kind: str) -> Iterator[pa.RecordBatch]:
    """Write the names of the columns and yield the batches of rows."""
    sys.stdin.buffer.seek(0)
    file = pa.PythonFile(sys.stdin.buffer, mode="r")
    if kind == "parquet":
        table = parquet.ParquetFile(file, memory_map=False)
        _write_names(table.schema_arrow.names)
        yield from table.iter_batches(batch_size=_BATCH, use_threads=False)
        return
    head = sys.stdin.buffer.read(6)
    sys.stdin.buffer.seek(0)
    if head == b"ARROW1":
        reader = ipc.open_file(file)
        _write_names(reader.schema.names)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i)
    else:
        stream = ipc.open_stream(file)
        _write_names(stream.schema.names)
        yield from stream


def _write_names(names: list[str]) -> None:
    sys.stdout.buffer.write(json.dumps(names).encode() + b"\n")


def _to_json(value: Any) -> Any:
    """Return text for the bytes of text columns without a type, None for other bytes."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return None
    return str(value)


if __name__ == "__main__":
    main()
