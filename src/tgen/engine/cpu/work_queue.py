"""Lock-free work queue of a pass: threads claim chunks and never wait for an idle thread.

A phase has two words, each in its own cache line: the pass and how many chunks of each half are
claimed, and the pass and how many are done. See README.md for why this is safe with late threads.
"""

import time

from llvmlite import ir

from tgen.engine.cpu.compiler import compiled
from tgen.engine.cpu.intrinsics import address, declare, i32, i64, primitive
from tgen.engine.cpu.job_layout import CACHE_LINE, COUNT_BITS, MAX_CHUNKS
from tgen.engine.cpu.target import X86

_PASS_BITS = 63 - 2 * COUNT_BITS
_SPINS = 2000  # polls of a phase before the CPU is yielded


@primitive(address, i64)
def _atomic_add(b, word, value):
    return b.atomic_rmw("add", b.inttoptr(word, i64.as_pointer()), value, "seq_cst")


@primitive(address)
def atomic_load(b, word):
    """Load an int64 that other threads write."""
    return b.load_atomic(b.inttoptr(word, i64.as_pointer()), "seq_cst", 8)


@primitive(address, i64)
def atomic_store(b, word, value):
    """Store an int64 that other threads read."""
    b.store_atomic(value, b.inttoptr(word, i64.as_pointer()), "seq_cst", 8)


@primitive(address, i64, i64)
def _compare_exchange(b, word, expected, value):
    pointer = b.inttoptr(word, i64.as_pointer())
    return b.extract_value(b.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst"), 1)


@primitive()
def _fence(b):
    b.fence("seq_cst")


@primitive()
def yield_cpu(b):
    """Let the operating system run another thread."""
    kind = ir.FunctionType(i32, [])
    return b.call(declare(b.module, kind, "sched_yield"), [])


@primitive()
def nanoseconds(b):
    """The time of the system's monotonic clock."""
    kind = ir.ArrayType(i64, 2)  # a C timespec: seconds and nanoseconds
    with b.goto_entry_block():
        timespec = b.alloca(kind)
    function = ir.FunctionType(i32, [i32, kind.as_pointer()])
    clock = ir.Constant(i32, time.CLOCK_MONOTONIC)
    b.call(declare(b.module, function, "clock_gettime"), [clock, timespec])
    seconds, rest = (b.extract_value(b.load(timespec), i) for i in range(2))
    return b.add(b.mul(seconds, ir.Constant(i64, 10**9)), rest)


@primitive()
def pause(b):
    """Pause briefly between two polls of a word."""
    if X86:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(declare(b.module, kind, "llvm.x86.sse2.pause"), [])


@compiled(inline=True)
def ticket(number, thread):
    """Return the pass number with, as the lowest bit, the half of the chunks to begin with: threads
    with odd numbers begin with the second half."""
    return number << 1 | thread & 1


@compiled(inline=True)
def next_pass(number):
    """The number of the pass after pass `number`; numbers begin again some day."""
    return (number + 1) & ((1 << _PASS_BITS) - 1)


@compiled(inline=True)
def _claim_chunk(word, ticket, n_chunks):
    """The next chunk of a phase of the ticket's pass, or -1 if none is left.

    A thread claims the chunks of its half in order, then those of the other: so it writes mostly
    what it has in its cache.
    """
    half = n_chunks // 2
    while True:
        value = atomic_load(word)
        first, second = value & MAX_CHUNKS, value >> COUNT_BITS & MAX_CHUNKS
        if (value >> 2 * COUNT_BITS) != ticket >> 1 or first + second >= n_chunks:
            return -1
        from_second = second < n_chunks - half if ticket & 1 else first >= half
        if _compare_exchange(word, value, value + (1 << COUNT_BITS if from_second else 1)):
            return half + second if from_second else first


@compiled
def claim_chunks(queue, phase, ticket, n_chunks):
    """Yield the chunks of a phase that this thread claims, then wait for those of other threads.

    A chunk counts as done when the next one is requested: never `break` out of the loop. Yields
    nothing once a later pass than the ticket's has begun.
    """
    next_chunk, n_done = queue + 2 * phase * CACHE_LINE, queue + (2 * phase + 1) * CACHE_LINE
    while True:
        chunk = _claim_chunk(next_chunk, ticket, n_chunks)
        if chunk < 0:
            break
        yield chunk
        _atomic_add(n_done, 1)
    spins = 0
    while True:
        value = atomic_load(n_done)
        if (value >> 2 * COUNT_BITS) != ticket >> 1 or (value & MAX_CHUNKS) == n_chunks:
            break
        spins += 1
        if spins > _SPINS:
            yield_cpu()
        else:
            pause()


@compiled
def reset_phases(queue, n_phases, number):
    """Set all phases to pass `number`; the previous pass must be over."""
    for i in range(2 * n_phases):
        atomic_store(queue + i * CACHE_LINE, number << 2 * COUNT_BITS)
    _fence()
