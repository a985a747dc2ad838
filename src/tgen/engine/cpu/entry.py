"""What threads call: to make a pass, or to help with those that others make. One function in all,
since what is compiled lies there once for each function that can be called from outside.
"""

import llvmlite.binding as llvm
import numba
from numba import njit

from tgen.engine.cpu.forward import forward
from tgen.engine.cpu.job_layout import JOB_SIZE, N_THREADS
from tgen.engine.cpu.simd import int_at
from tgen.engine.cpu.work_queue import begin, breathe, give_way, load_word, store_word

_FROM_C = {"sched_yield", "erff", "memset", "memcpy", "memmove"}
_EAGER, _PATIENT = 20_000, 40_000  # looks for a pass: without and with giving way


@njit
def _run(ours, job, newest, words, n_phases, thread):
    """A pass with the job `ours`, copied to where helpers look. One call: nothing interrupts it."""
    number = load_word(newest) + 1
    begin(words, n_phases, number)  # nobody's: who is late finds nothing while the job changes
    for i in range(JOB_SIZE):
        store_word(job + i * 8, int_at(ours, i))
    begin(words, n_phases, number + 1)
    store_word(newest, number + 1)
    forward(job, number + 1, thread)


@njit
def _serve(job, newest, seen, thread):
    """Takes part in every pass that comes; the last one's number, once none comes for a while."""
    idle = 0
    while idle < _PATIENT:
        number = load_word(newest)
        idle += 1
        if number != seen:
            seen = number
            if thread < int_at(job, N_THREADS):
                forward(job, number, thread)
                idle = 0
        elif idle > _EAGER:
            give_way()
        else:
            breathe()
    return seen


def enter(job, newest, ours, words, n_phases, seen, thread):
    """A pass with the job `ours`; without one, help as `thread`, and the last pass's number."""
    if ours != 0:
        _run(ours, job, newest, words, n_phases, thread)
        return 0
    return _serve(job, newest, seen, thread)


def machine_code(name: str) -> bytes:
    """An object file for this processor, with `enter` under this name as Numba calls functions:
    int32 name(int64 *result, void **error, int64, ...)."""
    signature = "int64(int64, int64, int64, int64, int64, int64, int64)"
    alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled = njit(signature, error_model="numpy", **alone)(enter)
    ((types, code),) = compiled.inspect_llvm().items()
    code = code.replace(compiled.overloads[types].fndesc.llvm_func_name, name)
    module = llvm.parse_assembly(code)
    foreign = {f.name for f in module.functions if f.is_declaration and "llvm." not in f.name}
    if not foreign <= _FROM_C:  # a linker that does not find a name ends the process
        raise RuntimeError(f"the kernels call {sorted(foreign - _FROM_C)}")
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=numba.config.CPU_NAME or llvm.get_host_cpu_name(),
        features=numba.config.CPU_FEATURES or llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    return bytes(machine.emit_object(module))
