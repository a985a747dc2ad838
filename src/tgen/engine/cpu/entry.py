"""The compiled function that Python calls: a pass, a continued text, help with passes, sampling."""

from tgen.engine.cpu.amx import AMX
from tgen.engine.cpu.compiler import compiled
from tgen.engine.cpu.intrinsics import call_address, load_double, load_int, store_int
from tgen.engine.cpu.job_layout import (
    CONTINUE,
    DESCRIBE,
    FORWARD_PTR,
    JOB_SIZE,
    N_THREADS,
    POSITION,
    RESULT,
    RUN,
    SAMPLE,
    SAMPLE_POSITION,
    SERVE,
    TOKEN_COLUMNS,
    TOKEN_ID,
    TOKENS_PTR,
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
def _continue(new_job, job, newest, queue, n_phases, request, n):
    """Run `new_job`, a pass of one token, and sample the next token from its logits, `n` times; a
    sample that is -1 ends this. The sampled tokens follow in the table of tokens: return their
    number."""
    first, sampled, n_sampled = load_int(new_job, TOKENS_PTR), 0, 0
    while sampled >= 0 and n_sampled < n:
        _run(new_job, job, newest, queue, n_phases, 0)
        sample_row(request)
        sampled = int(load_double(request, RESULT))
        if sampled >= 0:
            token = load_int(new_job, TOKENS_PTR)
            following = token + TOKEN_COLUMNS * 8
            for column in range(TOKEN_COLUMNS):
                store_int(following, column, load_int(token, column))
            store_int(following, TOKEN_ID, sampled)
            store_int(following, POSITION, load_int(token, POSITION) + 1)
            store_int(new_job, TOKENS_PTR, following)
            store_int(request, SAMPLE_POSITION, load_int(request, SAMPLE_POSITION) + 1)
            n_sampled += 1
    store_int(new_job, TOKENS_PTR, first)
    return n_sampled


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
    """Do a task: run the pass `new_job`, continue a text by `thread` tokens with the request `seen`
    (see `_continue`), help with passes as `thread` (see `_serve`), compute the request at `job`
    (see `sampling_kernels`), or return whether this code can use AMX."""
    if task == RUN:
        _run(new_job, job, newest, queue, n_phases, thread)
    elif task == CONTINUE:
        return _continue(new_job, job, newest, queue, n_phases, seen, thread)
    elif task == SERVE:
        return _serve(job, newest, seen, thread)
    elif task == SAMPLE:
        sample_row(job)
    elif task == DESCRIBE:
        describe_token(job)
    else:
        return _COMPILED_FOR_AMX
    return 0
