"""The compiled functions that Python calls: a pass, help with passes, and sampling."""

from tgen.engine.cpu.amx import AMX
from tgen.engine.cpu.compiler import compiled
from tgen.engine.cpu.intrinsics import call_address, load_int
from tgen.engine.cpu.job_layout import (
    DESCRIBE,
    FORWARD_PTR,
    JOB_SIZE,
    N_THREADS,
    RUN,
    SAMPLE,
    SERVE,
)
from tgen.engine.cpu.sampling_kernels import describe_token, sample_row
from tgen.engine.cpu.work_queue import (
    atomic_load,
    atomic_store,
    nanoseconds,
    next_pass,
    pause,
    reset_phases,
    ticket,
    yield_cpu,
)

_COMPILED_FOR_AMX = int(AMX)
_SPINS = 20_000  # polls for a new pass before the CPU is yielded
_LONGEST_WAIT = 8_000_000  # nanoseconds after that: if others need the CPU, a yield takes long


@compiled
def _run(new_job, job, newest, queue, n_phases, thread):
    """Copy `new_job` to where helpers look, and compute it. One call: nothing interrupts it."""
    number = next_pass(atomic_load(newest))
    reset_phases(queue, n_phases, number)  # a pass without a job: late helpers find no work
    for i in range(JOB_SIZE):
        atomic_store(job + i * 8, load_int(new_job, i))
    number = next_pass(number)
    reset_phases(queue, n_phases, number)
    atomic_store(newest, number)
    call_address(load_int(job, FORWARD_PTR), job, ticket(number, thread), thread)


@compiled
def _serve(job, newest, seen, thread):
    """Help with each new pass; return the last one's number after a while without a new one."""
    spins, start = 0, 0
    while spins < _SPINS or nanoseconds() - start < _LONGEST_WAIT:
        number = atomic_load(newest)
        spins += 1
        if number != seen:
            seen = number
            if thread < load_int(job, N_THREADS):
                call_address(load_int(job, FORWARD_PTR), job, ticket(number, thread), thread)
                spins = 0
        elif spins < _SPINS:
            pause()
        else:
            if spins == _SPINS:
                start = nanoseconds()
            yield_cpu()
    return seen


@compiled
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
