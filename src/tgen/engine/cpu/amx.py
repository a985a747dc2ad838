"""Matrix products by AMX: tiles of 16 rows of 64 bytes, which some x86 CPUs multiply."""

from typing import Any

from llvmlite import ir

from tgen.engine.cpu import target
from tgen.engine.cpu.intrinsics import address, declare, f32, i64, primitive
from tgen.engine.cpu.job_layout import (
    CACHE_LINE,
    GROUP,
    INT4,
    INT8,
    INT8_TILE_BYTES,
    PANEL,
    QUAD,
    TILE_BYTES,
    TILE_ROWS,
)
from tgen.engine.cpu.simd import (
    I8,
    INTEGERS,
    VECTOR,
    broadcast,
    element,
    fma,
    integer,
    load,
    load_float16,
    loop,
    offset,
    store,
)
from tgen.engine.cpu.tiles import GROUP_BYTES, load_quads, subtract_128

# Whether the CPU that is compiled for has AMX for bfloat16 and int8.
AMX = {"amx-tile", "amx-bf16", "amx-int8"} <= target.features()


def _make_begin(*shapes: tuple[int, int]) -> Any:
    """begin(): configure the thread's tiles: their rows, and the bytes of a row."""

    @primitive()
    def begin(b):
        if not AMX:
            return
        widths = b"".join(n_bytes.to_bytes(2, "little") for _, n_bytes in shapes)
        rows = bytes(n_rows for n_rows, _ in shapes)
        table = b"\1".ljust(16, b"\0") + widths.ljust(32, b"\0") + rows.ljust(16, b"\0")
        with b.goto_entry_block():
            pointer = b.alloca(ir.ArrayType(I8, len(table)))
        b.store(ir.Constant(pointer.type.pointee, bytearray(table)), pointer)
        _call(b, "ldtilecfg", b.bitcast(pointer, I8.as_pointer()))

    return begin


_WHOLE, _INPUTS, _WEIGHTS = (TILE_ROWS, CACHE_LINE), (TILE_ROWS, GROUP), (GROUP // QUAD, CACHE_LINE)
begin_bfloat16_tiles = _make_begin(*[_WHOLE] * 8)
begin_integer_tiles = _make_begin(_WHOLE, _WHOLE, _INPUTS, _INPUTS, _WEIGHTS, _WEIGHTS)


@primitive()
def end_tiles(b):
    """Release the thread's tiles, which cost time whenever threads are switched."""
    if AMX:
        _call(b, "tilerelease")


@primitive(*[address] * 8)
def multiply_bfloat16(b, n_blocks, n_panels, w, w_step, x, n, out, out_step):
    """out[m, r] = w[r] . x[m] for one or two blocks of 16 inputs and one or two panels of weights,
    of n groups; the panels are `w_step` bytes apart, the rows of `out` `out_step` bytes.

    x has the inputs' tiles, those of a block after each other.
    """
    if not AMX:
        return
    after = b.append_basic_block("tiles_done")
    switch = b.switch(b.add(b.mul(n_blocks, integer(2)), n_panels), after)
    for m, p in ((1, 1), (1, 2), (2, 1), (2, 2)):
        case = b.append_basic_block(f"tiles_{m}_{p}")
        switch.add_case(integer(2 * m + p), case)
        b.position_at_end(case)
        _emit_bfloat16(b, m, p, w, w_step, x, n, out, out_step)
        b.branch(after)
    b.position_at_end(after)


def _emit_bfloat16(b, n_blocks, n_panels, w, w_step, x, n, out, out_step):
    """Tiles 0 to 3 are the results, 4 and 5 inputs, 6 and 7 weights."""
    results = [(m, p) for m in range(n_blocks) for p in range(n_panels)]
    for i in range(len(results)):
        _call(b, "tilezero", _tile(i))
    blocks = [offset(b, x, b.mul(n, integer(TILE_BYTES)), m) for m in range(n_blocks)]
    panels = [offset(b, w, w_step, p) for p in range(n_panels)]
    with loop(b, n, 0, step=1) as (g, _, _):
        for m, block in enumerate(blocks):
            _load_tile(b, 4 + m, element(b, block, g, TILE_BYTES), CACHE_LINE)
        for p, panel in enumerate(panels):
            _load_tile(b, 6 + p, element(b, panel, g, TILE_BYTES), CACHE_LINE)
            for i, (m, of_panel) in enumerate(results):
                if of_panel == p:
                    _call(b, "tdpbf16ps", _tile(i), _tile(4 + m), _tile(6 + p))
    for i, (m, p) in enumerate(results):
        pointer = b.add(offset(b, out, out_step, TILE_ROWS * m), integer(4 * PANEL * p))
        _call(b, "tilestored64", _tile(i), _pointer(b, pointer), out_step)


def make_unpack(dtype: int) -> Any:
    """unpack(panel, n, out): the signed integers of a panel of n groups, without scales."""

    @primitive(address, i64, address)
    def unpack(b, panel, n, out):
        with loop(b, n, 0, step=1) as (g, _, _):
            group = element(b, panel, g, GROUP_BYTES[dtype])
            start = element(b, out, g, GROUP * PANEL)
            for quad, (weights,) in load_quads(b, [group], dtype):
                if dtype == INT8:  # 128 too large
                    weights = subtract_128(b, weights)
                store(b, weights, b.add(start, integer(CACHE_LINE * quad)), align=CACHE_LINE)

    return unpack


def make_multiply(dtype: int) -> Any:
    """multiply(panel, unpacked, x, n, out, out_step, scratch): out[m, r] = w[r] . x[m] for the 16
    rows of a panel of n groups and a block of 16 inputs, whose tiles are at x.

    Reads two groups too many of `unpacked` and x. `scratch` has room for two tiles.
    """

    @primitive(*[address] * 7)
    def multiply(b, panel, unpacked, x, n, out, out_step, scratch):
        if not AMX:
            return
        totals = [scratch, b.add(scratch, integer(TILE_BYTES))]

        def start(g, i):
            """Multiply group g with tiles i, 2 + i and 4 + i. Its totals are read much later, since
            reading what was just stored takes long."""
            _call(b, "tilezero", _tile(i))
            _load_tile(b, 2 + i, element(b, x, g, INT8_TILE_BYTES), GROUP)
            _load_tile(b, 4 + i, element(b, unpacked, g, GROUP * PANEL), CACHE_LINE)
            _call(b, "tdpbssd", _tile(i), _tile(2 + i), _tile(4 + i))
            _call(b, "tilestored64", _tile(i), _pointer(b, totals[i]), integer(CACHE_LINE))

        def finish(g, i, sums):
            """Add the totals of group g, in the order of `tiles`, and start group g + 2."""
            after = GROUP * PANEL if dtype == INT8 else GROUP * PANEL // 2
            factors = b.add(element(b, panel, g, GROUP_BYTES[dtype]), integer(after))
            inputs = b.add(element(b, x, g, INT8_TILE_BYTES), integer(TILE_ROWS * GROUP))
            scales, new = load_float16(b, factors), []
            for m, before in enumerate(sums):
                line = load(b, b.add(totals[i], integer(CACHE_LINE * m)), INTEGERS)
                scale = broadcast(b, load(b, b.add(inputs, integer(4 * m)), f32))
                new.append(fma(b, b.sitofp(line, VECTOR), b.fmul(scales, scale), before))
            if dtype == INT4:
                minima = load_float16(b, b.add(factors, integer(2 * PANEL)))
                for m, before in enumerate(new):
                    pointer = b.add(inputs, integer(2 * CACHE_LINE + 4 * m))
                    new[m] = fma(b, minima, broadcast(b, load(b, pointer, f32)), before)
            start(b.add(g, integer(2)), i)
            return new

        start(integer(0), 0)
        start(integer(1), 1)
        with loop(b, n, TILE_ROWS, step=2) as (g, sums, new_sums):
            even = finish(g, 0, sums)
            second = b.add(g, integer(1))
            before = b.block
            with b.if_then(b.icmp_signed("<", second, n)):
                odd = finish(second, 1, even)
                inside = b.block
            for one, two in zip(even, odd, strict=True):
                phi = b.phi(VECTOR)
                phi.add_incoming(one, before)
                phi.add_incoming(two, inside)
                new_sums.append(phi)
        for m, total in enumerate(new_sums):
            store(b, total, offset(b, out, out_step, m))

    return multiply


def _load_tile(b: ir.IRBuilder, number: int, pointer: ir.Value, step: int) -> None:
    _call(b, "tileloadd64", _tile(number), _pointer(b, pointer), integer(step))


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _pointer(b: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    return b.inttoptr(pointer, I8.as_pointer())


def _call(b: ir.IRBuilder, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    b.call(declare(b.module, kind, f"llvm.x86.{name}"), arguments)
