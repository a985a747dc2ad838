"""The times at which the phases of a command end, which `tgen bench --end-to-end` reads."""

import os
import time


def end_phase(name: str) -> None:
    """With TGEN_PHASES, write a line to stderr: time.monotonic_ns and the peak RSS in bytes."""
    if not os.environ.get("TGEN_PHASES"):
        return
    now = time.monotonic_ns()
    from tgen.machine.memory import peak_memory_bytes

    os.write(2, f"phase {name} {now} {peak_memory_bytes() or 0}\n".encode())
