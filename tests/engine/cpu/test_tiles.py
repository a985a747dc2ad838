"""Tiles keep their sums in vector registers, on CPUs that this one need not be."""

import re

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from tgen.engine.cpu import target, tiles
from tgen.engine.cpu.job_layout import BFLOAT16, FLOAT32, INT4, INT8
from tgen.engine.cpu.simd import integer, offset, store

CPUS = {
    "AVX-512": ("x86_64-linux-gnu", "cascadelake", "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni"),
    "Zen 4": ("x86_64-linux-gnu", "znver4", "avx2,fma,avx512f,avx512bw,avx512vnni,avx512bf16"),
    "AVX2": ("x86_64-linux-gnu", "haswell", "avx2,fma,f16c"),
    "NEON": ("aarch64-linux-gnu", "neoverse-n1", "neon,dotprod"),
}
SPILL = re.compile(r"\(%rsp\).*%[xyz]mm|%[xyz]mm.*\(%rsp\)|\bq\d+,.*\[sp")
i64 = ir.IntType(64)


def assembly_of_tile(dtype, n_vectors, n_panels, triple, cpu, features):
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [i64] * 6), "tile")
    b = ir.IRBuilder(function.append_basic_block())
    w, w_step, x, x_step, n, out = function.args
    panels = [offset(b, w, w_step, i) for i in range(n_panels)]
    vectors = [offset(b, x, x_step, i) for i in range(n_vectors)]
    for i, result in enumerate(tiles.EMIT[dtype](b, panels, vectors, n)):
        store(b, result, b.add(out, integer(64 * i)))
    b.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    on = ",".join(f"+{one}" for one in features.split(","))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu, on, opt=3)
    return machine.emit_assembly(llvm.parse_assembly(str(module)))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, INT8, INT4])
@pytest.mark.parametrize("cpu", CPUS)
def test_sums_stay_in_registers(cpu, dtype, monkeypatch):
    triple, name, features = CPUS[cpu]
    monkeypatch.setattr(target, "features", lambda: set(features.split(",")))
    monkeypatch.setattr(target, "cpu_name", lambda: name)
    monkeypatch.setattr(target, "ARM", triple.startswith("aarch64"))
    shapes = tiles.tile_shapes(dtype)
    assert max(shapes) >= {"AVX-512": (8, 1), "Zen 4": (8, 1), "AVX2": (2, 1), "NEON": (2, 1)}[cpu]
    for n_vectors, n_panels in shapes:
        code = assembly_of_tile(dtype, n_vectors, n_panels, triple, name, features)
        assert not SPILL.findall(code), (n_vectors, n_panels)
