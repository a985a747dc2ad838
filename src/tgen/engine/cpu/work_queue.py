"""Lock-free work queue of a pass: threads claim chunks and never wait for an idle thread.

A phase has two words, each in its own cache line: `pass << 20 | next chunk` and
`pass << 20 | chunks done`. See README.md for why this is safe with late threads.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from tgen.engine.cpu.intrinsics import address, i32, i64, primitive
from tgen.engine.cpu.job_layout import CACHE_LINE
from tgen.engine.cpu.target import X86

_SPINS = 2000  # polls of a phase before the CPU is yielded


@primitive(types.int64(address, types.int64))
def _atomic_add(b, word, value):
    return b.atomic_rmw("add", b.inttoptr(word, i64.as_pointer()), value, "seq_cst")


@primitive(types.int64(address))
def atomic_load(b, word):
    """Load an int64 that other threads write."""
    return b.load_atomic(b.inttoptr(word, i64.as_pointer()), "seq_cst", 8)


@primitive(types.void(address, types.int64))
def atomic_store(b, word, value):
    """Store an int64 that other threads read."""
    b.store_atomic(value, b.inttoptr(word, i64.as_pointer()), "seq_cst", 8)


@primitive(types.boolean(address, types.int64, types.int64))
def _compare_exchange(b, word, expected, value):
    pointer = b.inttoptr(word, i64.as_pointer())
    return b.extract_value(b.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst"), 1)


@primitive(types.void())
def _fence(b):
    b.fence("seq_cst")


@primitive(types.int32())
def yield_cpu(b):
    """Let the operating system run another thread."""
    kind = ir.FunctionType(i32, [])
    return b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])


@primitive(types.void())
def pause(b):
    """Pause briefly between two polls of a word."""
    if X86:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])


@njit(inline="always")
def _claim_chunk(word, number, n_chunks):
    """The next chunk of a phase of pass `number`, or -1 if none is left."""
    while True:
        value = atomic_load(word)
        if (value >> 20) != number:
            return -1
        chunk = value & 0xFFFFF
        if chunk >= n_chunks:
            return -1
        if _compare_exchange(word, value, value + 1):
            return chunk


@njit
def claim_chunks(queue, phase, number, n_chunks):
    """Yield the chunks of a phase that this thread claims, then wait for those of other threads.

    A chunk counts as done when the next one is requested: never `break` out of the loop. Yields
    nothing once a later pass than `number` has begun.
    """
    next_chunk, n_done = queue + 2 * phase * CACHE_LINE, queue + (2 * phase + 1) * CACHE_LINE
    while True:
        chunk = _claim_chunk(next_chunk, number, n_chunks)
        if chunk < 0:
            break
        yield chunk
        _atomic_add(n_done, 1)
    spins = 0
    while atomic_load(n_done) < (number << 20) + n_chunks:
        spins += 1
        if spins > _SPINS:
            yield_cpu()
        else:
            pause()


@njit
def reset_phases(queue, n_phases, number):
    """Set all phases to pass `number`; the previous pass must be over."""
    for i in range(2 * n_phases):
        atomic_store(queue + i * CACHE_LINE, number << 20)
    _fence()
