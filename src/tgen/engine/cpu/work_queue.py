"""How threads share the work of a pass without ever waiting for a thread that does nothing.

A pass goes through phases; a phase's work is cut into chunks. Whoever is there claims the next one.
A phase is over when its chunks are done, not when all threads have come by: one that the system has
put aside costs nothing unless it holds a chunk, and one that wakes up late finds nothing to claim,
since every claim carries the number of its pass.

Two words a phase, each in a cache line of its own: `pass << 20 | next chunk` and
`pass << 20 | chunks done`.
"""

import platform

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE = 64  # bytes
_SPINS = 2000  # looks at a phase before the processor is offered to others
_i32, _i64 = ir.IntType(32), ir.IntType(64)
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")


@intrinsic
def _add(_, address, value):
    def generate(_, b, __, arguments):
        pointer = b.inttoptr(arguments[0], _i64.as_pointer())
        return b.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_word(_, address):
    """The int64 there, as other threads left it."""

    def generate(_, b, __, arguments):
        return b.load_atomic(b.inttoptr(arguments[0], _i64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_word(_, address, value):
    """Stores an int64 that other threads look at."""

    def generate(context, b, _, arguments):
        pointer = b.inttoptr(arguments[0], _i64.as_pointer())
        b.store_atomic(arguments[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _swap_if(_, address, expected, value):
    def generate(_, b, __, arguments):
        pointer = b.inttoptr(arguments[0], _i64.as_pointer())
        swapped = b.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return b.extract_value(swapped, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _fence(_):
    def generate(context, b, _, __):
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(_):
    """Offers the processor to other threads."""

    def generate(_, b, __, ___):
        kind = ir.FunctionType(_i32, [])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])

    return types.int32(), generate


@intrinsic
def breathe(_):
    """A short pause between two looks at a word."""

    def generate(context, b, _, __):
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(inline="always")
def claim(words, phase, number, n_chunks):
    """The next chunk of this phase of pass `number`, or -1 if none is left."""
    word = words + 2 * phase * _LINE
    while True:
        value = load_word(word)
        if (value >> 20) != number:
            return -1
        chunk = value & 0xFFFFF
        if chunk >= n_chunks:
            return -1
        if _swap_if(word, value, value + 1):
            return chunk


@njit(inline="always")
def chunk_done(words, phase):
    """Says that a claimed chunk is done."""
    _add(words + (2 * phase + 1) * _LINE, 1)


@njit(inline="always")
def wait(words, phase, number, n_chunks):
    """Returns when all chunks are done, or when a later pass has begun."""
    word = words + (2 * phase + 1) * _LINE
    spins = 0
    while load_word(word) < (number << 20) + n_chunks:
        spins += 1
        if spins > _SPINS:
            give_way()
        else:
            breathe()


@njit
def begin(words, n_phases, number):
    """Sets the words for pass `number`; the one before must be over."""
    for i in range(2 * n_phases):
        store_word(words + i * _LINE, number << 20)
    _fence()
