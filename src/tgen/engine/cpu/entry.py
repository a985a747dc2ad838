"""The one compiled function: it starts a pass, helps with the passes of others, or samples.

One function only, because the machine code contains a copy of everything per external function.
"""

import llvmlite.binding as llvm
import numba
from numba import njit

from tgen.engine.cpu.amx import is_compiled
from tgen.engine.cpu.forward import forward
from tgen.engine.cpu.intrinsics import load_int
from tgen.engine.cpu.job_layout import DESCRIBE, JOB_SIZE, N_THREADS, RUN, SAMPLE, SERVE
from tgen.engine.cpu.sampling_kernels import describe_token, sample_row
from tgen.engine.cpu.work_queue import (
    atomic_load,
    atomic_store,
    next_pass,
    pause,
    reset_phases,
    ticket,
    yield_cpu,
)

_C_FUNCTIONS = {"sched_yield", "erff", "log", "sqrtf", "memset", "memcpy", "memmove"}
_COMPILED_FOR_AMX = int(is_compiled())
_SPINS_BEFORE_YIELD, _SPINS_BEFORE_SLEEP = 20_000, 40_000  # polls for a new pass


@njit
def _run(new_job, job, newest, queue, n_phases, thread):
    """Copy `new_job` to where helpers look, and compute it. One call: nothing interrupts it."""
    number = next_pass(atomic_load(newest))
    reset_phases(queue, n_phases, number)  # a pass without a job: late helpers find no work
    for i in range(JOB_SIZE):
        atomic_store(job + i * 8, load_int(new_job, i))
    number = next_pass(number)
    reset_phases(queue, n_phases, number)
    atomic_store(newest, number)
    forward(job, ticket(number, thread), thread)


@njit
def _serve(job, newest, seen, thread):
    """Help with each new pass; return the last one's number after a while without a new one."""
    spins = 0
    while spins < _SPINS_BEFORE_SLEEP:
        number = atomic_load(newest)
        spins += 1
        if number != seen:
            seen = number
            if thread < load_int(job, N_THREADS):
                forward(job, ticket(number, thread), thread)
                spins = 0
        elif spins > _SPINS_BEFORE_YIELD:
            yield_cpu()
        else:
            pause()
    return seen


def enter(task, job, newest, new_job, queue, n_phases, seen, thread):
    """Do a task: run the pass `new_job`, help with passes as `thread` (see `_serve`), compute the
    request at `job` (see `sampling_kernels`), or return whether this code can use AMX."""
    if task == RUN:
        _run(new_job, job, newest, queue, n_phases, thread)
    elif task == SERVE:
        return _serve(job, newest, seen, thread)
    elif task == SAMPLE:
        sample_row(job)
    elif task == DESCRIBE:
        describe_token(job)
    else:
        return _COMPILED_FOR_AMX
    return 0


def machine_code(name: str) -> bytes:
    """Compile `enter` to an object file for this CPU, with Numba's calling convention:
    int32 name(int64 *result, void **error, int64, ...)."""
    signature = "int64(int64, int64, int64, int64, int64, int64, int64, int64)"
    no_wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled = njit(signature, error_model="numpy", **no_wrappers)(enter)
    ((types, code),) = compiled.inspect_llvm().items()
    code = code.replace(compiled.overloads[types].fndesc.llvm_func_name, name)
    module = llvm.parse_assembly(code)
    external = {f.name for f in module.functions if f.is_declaration and "llvm." not in f.name}
    if not external <= _C_FUNCTIONS:  # the linker ends the process if it does not find a name
        raise RuntimeError(f"the kernels call {sorted(external - _C_FUNCTIONS)}")
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=numba.config.CPU_NAME or llvm.get_host_cpu_name(),
        features=numba.config.CPU_FEATURES or llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    code = bytes(machine.emit_object(module))
    if b"llvm." in code:  # LLVM calls an intrinsic that it does not know, as if it was a function
        raise RuntimeError("the kernels call an LLVM intrinsic that this version does not have")
    return code
