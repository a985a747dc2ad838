"""Training on several ranks equals training in one process, and leaves the same directory."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chats import assistant, user
from support.command import clean_environment
from support.runs import load_run
from tgen import runs
from tgen.checkpoint.safetensors_file import open_tensors
from tgen.cli import app
from tgen.errors import UsageError
from tgen.lora import adapter, model_with_adapter
from tgen.runs import ResumeRequest, RunRequest, log
from tgen.runs.overrides import parse_overrides

SHAPE = {"d_model": 32, "n_layers": 2, "n_heads": 2, "context_length": 16, "eval_every": 3}
STEPS = 8
CLOSE = 1e-6  # nats: float32 sums in another order after eight steps
# Repetitive text has gradients in few directions; in the others there is only rounding, which Muon
# amplifies.
LETTERS = np.random.default_rng(0).integers(97, 123, 12_000).astype(np.uint8)
LETTERS[np.random.default_rng(1).random(len(LETTERS)) < 0.2] = ord(" ")
VARIED = LETTERS.tobytes()
TERM = "os.kill(os.getpid(), signal.SIGTERM)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# Makes a rank other than 0 fail if it reads the corpus.
ONE_READS = "import os, tgen.corpus as c\nif os.environ['RANK'] != '0': c.read_in_steps = None\n"

# Makes a save of a state fail if it gathers a tensor.
NO_GATHER = """
import threading
from torch.distributed.tensor import DTensor
from tgen.runs import saved_state
from tgen.training.state import TrainState
real, own = DTensor.full_tensor, threading.local()
def gather(tensor):
    assert not getattr(own, "saves", False)
    return real(tensor)
DTensor.full_tensor = gather
def alone(function):
    def call(*arguments, **named):
        own.saves = True
        result = function(*arguments, **named)
        own.saves = False
        return result
    return call
saved_state.save_state = alone(saved_state.save_state)
TrainState.own_arrays = alone(TrainState.own_arrays)
"""
# Kills rank 1 before it has flushed its part of the third state.
KILLED_IN_SAVE = """
import os, signal
from tgen.storage import files
flush, flushed = files.sync, []
def sync(path):
    flushed.append(path)
    if os.environ["RANK"] == "1" and len(flushed) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(path)
files.sync = sync
"""

# Lets rank 1 write its part of the first state in a run only after `step`, and then raises OSError
# if `fails`.
LATE_SAVE = """
import errno, os, threading
from tgen.cli.train import progress
from tgen.runs import checkpoint_saver
from tgen.storage import files
checkpoint_saver._MAX_RETRY_SECONDS = 0.0
later, write, before = threading.Event(), files.write_new, progress.TrainingProgress.show
def show_and_tell(view, report):
    before(view, report)
    if getattr(report, "step", 0) >= {step}:
        later.set()
def write_late(path, *arguments, **named):
    late = path.name.startswith("state-") and threading.current_thread().name == "checkpoint"
    if late and not later.is_set() and os.environ["RANK"] == "1":
        if not later.wait(300):
            os._exit(9)
        if {fails}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(path, *arguments, **named)
progress.TrainingProgress.show, files.write_new = show_and_tell, write_late
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_bytes(VARIED)
    return path


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A finished run of one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert app.run([str(one) for one in command(corpus, out)]) == 0
    return out


def command(corpus: Path, out: Path, *more: object, batch: int = 6, **settings: object) -> list:
    # Rounding to bfloat16 enlarges differences.
    settings = SHAPE | {"batch_size": batch, "precision": "float32"} | settings
    arguments = [f"--set={name}={value}" for name, value in settings.items() if value is not None]
    return ["train", corpus, "-o", out, "--steps", STEPS, "--threads", 1, "-q", *arguments, *more]


def code_of_ranks(arguments: list, *, action: str, at: int) -> str:
    """Return code for each rank: the command, and what rank 1 does after a step."""
    return f"""
import os, signal
from tgen.cli import app
from tgen.cli.train import progress
shown = progress.TrainingProgress.show
def show(view, report):
    shown(view, report)
    if getattr(report, "step", 0) == {at} and os.environ.get("RANK", "1") == "1":
        {action}
progress.TrainingProgress.show = show
os._exit(app.run({[str(one) for one in arguments]!r}))
"""


def losses(out: Path) -> dict[tuple[str, int], float]:
    """Return the loss of each step and evaluation."""
    records = [r for r in log.read(out) if r["kind"] in ("StepReport", "EvalReport")]
    values = {(r["kind"], r["step"]): r["loss"] for r in records}
    assert len(values) == len(records)
    return values


def names(out: Path) -> list[str]:
    """Return the names of a run's files; the number of ranks that wrote a state does not count."""
    paths = [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()]
    return sorted({re.sub(r"state-\d+-of-\d+\.", "state.", path) for path in paths})


def tensors(out: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shapes and dtypes of the tensors of a run's model and states."""
    return {
        f"{folder.name if folder != out else ''}: {name}": (tensor.shape, str(tensor.dtype))
        for folder in (out, *out.glob("training/state-*"))
        for name, tensor in open_tensors(sorted(folder.glob("*.safetensors"))).items()
    }


def assert_same(out: Path, whole: Path) -> None:
    """Check that two runs took the same steps and left the same files up to rounding."""
    ours, theirs = losses(out), losses(whole)
    assert ours.keys() == theirs.keys()
    assert max(step for _, step in ours) == STEPS
    assert max(abs(ours[key] - theirs[key]) for key in ours) <= CLOSE
    assert names(out) == names(whole)
    for name in ("config.json", "tokenizer.json", "training/tokens.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    plans = [json.loads((folder / "training/run.json").read_bytes()) for folder in (out, whole)]
    assert plans[0]["plan"]["train"] == plans[1]["plan"]["train"]
    assert tensors(out) == tensors(whole)
    assert model_with_adapter.load(out).config == model_with_adapter.load(whole).config


def resume_alone(out: Path) -> None:
    list(runs.resume(ResumeRequest(out=out, threads=1)))


def statuses(ranks: list) -> list[int]:
    return [rank.status for rank in ranks]


def error_line(ranks: list) -> str:
    """Return the single error line of all ranks."""
    [line] = [line for rank in ranks for line in rank.err.splitlines() if "error: " in line]
    return line


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_like_one_process(on_ranks, corpus, whole, tmp_path, parallel):
    out = tmp_path / "two"
    arguments = command(corpus, out, "--parallel", parallel, batch=3)
    code = ONE_READS + NO_GATHER + code_of_ranks(arguments, action="0", at=-1)
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [0, 0], ranks
    assert not any(rank.err for rank in ranks)
    assert_same(out, whole)
    n_files = len(list((out / "training/state-00000008").glob("*.safetensors")))
    assert n_files == (2 if parallel == "fsdp" else 1)


@pytest.mark.parametrize("fails", [False, True])
def test_fsdp_trains_on_while_a_rank_writes(on_ranks, corpus, whole, tmp_path, fails):
    out = tmp_path / "two"
    arguments = command(corpus, out, "--parallel", "fsdp", "--set=keep_checkpoints=9", batch=3)
    code = LATE_SAVE.format(fails=fails, step=5) + code_of_ranks(arguments, action="0", at=-1)
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [0, 0], ranks
    assert losses(out).keys() == losses(whole).keys()
    saves = [record for record in log.read(out) if record["kind"] == "SavingReport"]
    assert [(bool(record["failed"]), record["step"] > 3) for record in saves] == (
        [(True, False), (False, True)] if fails else []
    )
    states = {int(path.name[-8:]) for path in out.glob("training/state-*")}
    assert (3 in states) == (not fails)
    assert {0, 6, 8} <= states
    if not fails:  # the weights are those of step 3, not of the steps while it was written
        for path in out.glob("training/state-*"):
            if int(path.name[-8:]) > 3:
                shutil.rmtree(path)
    resume_alone(out)
    assert not list(out.glob("training/damaged-*"))
    assert losses(out).keys() == losses(whole).keys()
    assert max(abs(losses(out)[key] - losses(whole)[key]) for key in losses(whole)) <= CLOSE


# Rank 1 raises an error at the fifth step.
FAILS = """
import os
from tgen.training import loop
take_step = loop._step
def take_step_or_fail(model, batches, config, state):
    if state.progress.step == 4 and os.environ["RANK"] == "1":
        raise {error}
    return take_step(model, batches, config, state)
loop._step = take_step_or_fail
"""
# Rank 1 writes its part of a state only when a run that fails waits for that.
WRITES_AT_THE_END = """
from tgen.runs.checkpoint_saver import CheckpointSaver
close = CheckpointSaver.close
def write_and_close(saver):
    later.set()
    close(saver)
CheckpointSaver.close = write_and_close
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_error_in_a_step_is_printed_once(on_ranks, corpus, tmp_path, parallel):
    arguments = command(corpus, tmp_path / "two", "--parallel", parallel, batch=3)
    code = FAILS.format(error="OSError(28, 'No space left')")
    ranks = on_ranks(code=code + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [1, 1], ranks
    assert "No space left" in error_line(ranks)


def test_run_that_fails_waits_for_the_save_in_the_background(on_ranks, corpus, tmp_path):
    out = tmp_path / "two"
    arguments = command(corpus, out, "--parallel", "fsdp", batch=3)
    code = LATE_SAVE.format(fails=False, step=9) + WRITES_AT_THE_END
    code += FAILS.format(error="KeyError")
    code += code_of_ranks(arguments, action="0", at=-1)
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [70, 70], ranks
    assert (out / "training/state-00000003/manifest.json").exists()


# Rank 1 writes its part of each state only when the run waits for that. Ranks fail if they gather
# the model, for a sample or a save, before that.
ONE_COPY = """
from tgen.runs.checkpoint_saver import CheckpointSaver
from tgen.training.state import TrainState
finish, copy_weights, savers = CheckpointSaver.finish, TrainState.copy_weights, []
def write_and_finish(saver):
    savers.append(saver)
    later.set()
    yield from finish(saver)
    later.clear()
def copy_first(state):
    assert not any(saver.is_writing for saver in savers)
    return copy_weights(state)
CheckpointSaver.finish, TrainState.copy_weights = write_and_finish, copy_first
"""


@pytest.mark.parametrize("more", [(), ("--val-fraction", 0)])
def test_model_is_gathered_once_the_save_before_has_ended(on_ranks, corpus, tmp_path, more):
    arguments = command(corpus, tmp_path / "two", "--parallel", "fsdp", *more, batch=3)
    code = LATE_SAVE.format(fails=False, step=9) + ONE_COPY
    ranks = on_ranks(code=code + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [0, 0], ranks


# Each save ends before the step after it, and counts as one second.
SECOND_PER_SAVE = """
import time
from tgen.runs.checkpoint_saver import CheckpointSaver
finish_if_written = CheckpointSaver.finish_if_written
def finish(saver):
    while saver.is_writing:
        time.sleep(0.01)
    return 1.0 if (yield from finish_if_written(saver)) else 0.0
CheckpointSaver.finish_if_written = finish
"""


def test_time_of_saves_is_that_of_the_last_one(on_ranks, corpus, tmp_path):
    more = "--parallel", "fsdp", "--val-fraction", 0
    arguments = command(corpus, tmp_path / "two", *more, batch=3, eval_every=2)
    ranks = on_ranks(code=SECOND_PER_SAVE + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [0, 0], ranks
    manifest = json.loads((tmp_path / "two/training/state-00000008/manifest.json").read_bytes())
    progress = manifest["progress"]
    assert progress["evaluation_seconds"] + progress["saving_seconds"] == 1.0


# Rank 1 runs out of memory where it writes its part of a state.
OUT_OF_MEMORY = """
import os, threading
from tgen.storage import files
write = files.write_new
def write_or_fail(path, *arguments, **named):
    if os.environ["RANK"] == "1" and threading.current_thread().name == "checkpoint":
        raise MemoryError
    write(path, *arguments, **named)
files.write_new = write_or_fail
"""


def test_error_of_a_thread_that_saves_ends_all_ranks_at_once(on_ranks, corpus, tmp_path):
    arguments = command(corpus, tmp_path / "two", "--parallel", "fsdp", batch=3)
    code = OUT_OF_MEMORY + code_of_ranks(arguments, action="0", at=-1)
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [1, 1], ranks
    # Rank 1 prints its error, too, if rank 0 still waits for it.
    assert error_line(ranks) == "error: rank 1: out of memory"


# The last state cannot be saved; the directory is on a disk of rank 0, which looks at it late.
FULL_DISK = """
import errno, os, time
from pathlib import Path
from tgen.runs import saved_state, trainer
from tgen.runs.checkpoint_saver import CheckpointSaver
trainer._FINAL_RETRY_SECONDS = ()
save, check = saved_state.save_state, CheckpointSaver.raise_if_failed
def save_or_fail(out, progress, *arguments, **named):
    if progress["step"] == 8:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save(out, progress, *arguments, **named)
def check_late(saver):
    if os.environ["RANK"] == "1":
        saver.out = Path("elsewhere")
    else:
        time.sleep(1)
    check(saver)
saved_state.save_state, CheckpointSaver.raise_if_failed = save_or_fail, check_late
"""


def test_error_of_the_last_save_is_that_of_rank_0(on_ranks, corpus, tmp_path):
    arguments = command(corpus, tmp_path / "two", "--parallel", "ddp", batch=3)
    ranks = on_ranks(code=FULL_DISK + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [1, 1], ranks
    assert f"cannot save the end of the run in {tmp_path / 'two'}: No space" in error_line(ranks)


# The corpus counts as large, and each rank prints how many batches it tokenized.
LARGE = """
import os
from tgen.corpus import parallel_tokenize, tokenize
from tgen.machine.worker_pool import _Worker
from tgen.runs import tokenizing
tokenize._PIECE = parallel_tokenize._BATCH = tokenizing._PARALLEL_BYTES = 1000
batches, receive, end = [], _Worker.receive, os._exit
def count(worker):
    batches.append(worker)
    return receive(worker)
def print_and_end(status):
    print(len(batches), flush=True)
    end(status)
_Worker.receive, os._exit = count, print_and_end
"""


def test_all_ranks_tokenize_a_large_corpus(on_ranks, corpus, whole, tmp_path):
    out = tmp_path / "two"
    start, again = command(corpus, out, batch=3), ["train", corpus, "--resume", "-o", out, "-q"]
    for arguments, n_batches in ((start, [3, 3]), (again, [3, 3]), (again, [0, 0])):
        code = ONE_READS + LARGE + code_of_ranks(arguments, action="0", at=-1)
        ranks = on_ranks(code=code, n=2)
        assert statuses(ranks) == [0, 0], ranks
        assert [int(rank.out) for rank in ranks] == n_batches
        assert_same(out, whole)
        if arguments == start:
            (out / "training/tokens.safetensors").write_bytes(b"damaged")


def test_all_ranks_tokenize_many_conversations(on_ranks, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "two"
    lines = [{"messages": [*user(f"What is {i}?"), assistant(f"{i}.")]} for i in range(60)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert app.run([str(one) for one in command(rows, tmp_path / "one", context_length=64)]) == 0
    arguments = command(rows, out, batch=3, context_length=64)
    few = "from tgen.runs import chat_rows, row_tokens\nchat_rows._PARALLEL_BYTES = 1\n"
    few += "row_tokens._BATCH_ROWS = 10\n"
    ranks = on_ranks(
        code=ONE_READS + LARGE + few + code_of_ranks(arguments, action="0", at=-1), n=2
    )
    assert statuses(ranks) == [0, 0], ranks
    assert [int(rank.out) for rank in ranks] == [3, 3]
    assert_same(out, tmp_path / "one")


def test_ranks_train_with_products_in_bfloat16(on_ranks, corpus, whole, tmp_path):
    settings = {"precision": "bfloat16"}
    assert app.run([str(one) for one in command(corpus, tmp_path / "one", **settings)]) == 0
    alone, exact = losses(tmp_path / "one"), losses(whole)
    for parallel in ("ddp", "fsdp"):
        out = tmp_path / parallel
        arguments = command(corpus, out, "--parallel", parallel, batch=3, **settings)
        ranks = on_ranks(arguments, arguments)
        assert statuses(ranks) == [0, 0], ranks
        ours = losses(out)
        for step in (1, 2):  # before rounding is amplified
            key = "StepReport", step
            assert abs(ours[key] - alone[key]) <= abs(exact[key] - alone[key]) / 2 + 1e-5
        assert max(abs(ours[key] - alone[key]) for key in alone) <= 0.05


def test_fsdp_gathers_blocks_in_bfloat16(on_ranks):
    code = """
import torch
from support.models import make_model
from tgen import distributed
from tgen.config.training import ResolvedTrainConfig
from tgen.model.precision import product_precision
from tgen.training.loss import DeviceBatch
from tgen.training.state import full_tensor, new_state
train = ResolvedTrainConfig(precision="bfloat16")
def gradients(config, tokens, precision, n_ranks, parallel):
    state, dtypes = new_state(config, train, torch.device("cpu"), parallel=parallel), set()
    state.model.blocks[0].feed_forward.up_proj.register_forward_pre_hook(
        lambda module, _: dtypes.add(module.weight.dtype))
    batch = DeviceBatch(tokens, None, None)
    with product_precision(precision):
        (state.step_loss(batch) * n_ranks).backward()
    with torch.no_grad():
        state.step_loss(batch, per_window=True)
    assert dtypes == {torch.bfloat16 if parallel else torch.float32}
    return torch.cat([full_tensor(p.grad).flatten() for p in state.model.parameters()])
with distributed.join_process_group():
    rank = distributed.ranks().rank
    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(1))
    for family in ("gpt2", "gemma3"):  # LayerNorm with biases, RMSNorm
        config = make_model(family, vocab_size=64).config
        exact = gradients(config, tokens, "float32", 1, None)
        alone = gradients(config, tokens, "bfloat16", 1, None)
        ours = gradients(config, tokens[rank : rank + 1], "bfloat16", 2, "fsdp")
        assert ours.dtype == torch.float32
        assert (alone - exact).norm() > 2**-9 * exact.norm(), family
        assert (ours - alone).norm() < 2**-8 * exact.norm(), family  # one more rounding
"""
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [0, 0], ranks


def test_fsdp_allocates_the_whole_model_on_rank_zero_only(on_ranks):
    code = """
import numpy as np
import torch
from support.models import make_model
from tgen import distributed
from tgen.config.training import ResolvedTrainConfig
from tgen.training.state import local_tensor, new_state
with distributed.join_process_group():
    rank = distributed.ranks().rank
    config = make_model("qwen3", vocab_size=64, tied_embeddings=False).config
    counts = np.arange(64**2, dtype=np.float32).reshape(64, 64) % 7 if rank == 0 else None
    train, given = ResolvedTrainConfig(bigram_start=True), make_model("qwen3", vocab_size=64)
    starts = (config, {"bigram_counts": counts}), (given.config, {"weights": given.to_arrays()})
    for config, start in starts:
        options = (config, train, torch.device("cpu"))
        alone = new_state(*options, **start) if rank == 0 else None
        if rank == 1:  # random weights are those of rank 0
            torch.nn.init.normal_ = None
        state = new_state(*options, parallel="fsdp", **start)
        parameters = list(state.model.parameters())
        n_local = sum(local_tensor(p).numel() for p in parameters)
        assert n_local < 0.6 * sum(p.numel() for p in parameters)
        arrays = state.copy_weights()
        if alone is not None:
            assert arrays.keys() == alone.model.to_arrays().keys()
            for name, array in alone.model.to_arrays().items():
                assert np.array_equal(array, arrays[name]), name
            assert torch.equal(alone.model.cos, state.model.cos)
"""
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [0, 0], ranks


def test_three_ranks_share_batches_with_loss_masks_micro_batches_and_dropout(on_ranks, tmp_path):
    corpus, whole = tmp_path / "rows.jsonl", tmp_path / "whole"
    words = VARIED.decode().split()
    some = [" ".join(words[i : i + 5]) for i in range(400)]
    rows = [{"prompt": some[i], "completion": some[i + 100]} for i in range(300)]
    corpus.write_text("\n".join(map(json.dumps, rows)))
    settings: dict[str, Any] = {"accumulation": 2, "bpe_dropout": 0.2, "dropout": 0.2}
    settings |= {"n_layers": 1, "eval_every": 4, "consistency": 1.5}
    settings |= {"bpe_dropout_in_decay": "true", "optimizer": "adamw", "learning_rate": 0.002}
    more = ("--tokenizer", "bpe", "--vocab-size", 300)
    assert statuses(on_ranks(command(corpus, whole, *more, batch=12, **settings))) == [0]
    out = tmp_path / "three"
    arguments = command(corpus, out, *more, "--parallel", "fsdp", batch=4, **settings)
    ranks = on_ranks(*[arguments] * 3)
    assert statuses(ranks) == [0, 0, 0], ranks
    assert_same(out, whole)


# Makes each pair of ranks a machine.
TWO_EACH = """
import os
os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(int(os.environ["RANK"]) % 2)}
"""


def test_run_of_two_machines_resumes_on_two_ranks_and_in_one_process(on_ranks, corpus, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert app.run([str(one) for one in command(corpus, whole, batch=12)]) == 0
    start = command(corpus, out, "--parallel", "hsdp", batch=3)
    resume = ["train", "--resume", "-o", out, "-q", "--parallel", "fsdp", "--threads", 1]
    for arguments, n, step in ((start, 4, 2), (resume, 2, 5)):
        code = TWO_EACH + code_of_ranks(arguments, action=TERM, at=step)
        ranks = on_ranks(code=code, n=n)
        assert statuses(ranks) == [143] * n, ranks
        n_files = len(list((out / f"training/state-{step:08d}").glob("*.safetensors")))
        assert n_files == 2  # with HSDP, the first machine writes
        assert losses(out).keys() == {key for key in losses(whole) if key[1] <= step}
    resume_alone(out)
    assert_same(out, whole)


def test_run_of_one_process_resumes_on_two_ranks(on_ranks, corpus, whole, tmp_path):
    out = tmp_path / "out"
    ranks = on_ranks(code=code_of_ranks(command(corpus, out), action=TERM, at=5), n=1)
    assert statuses(ranks) == [143]
    arguments = ["train", corpus, "--resume", "-o", out, "-q", "--parallel", "fsdp"]
    ranks = on_ranks(code=ONE_READS + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [0, 0], ranks
    assert_same(out, whole)


@pytest.mark.parametrize(("parallel", "where"), [("ddp", ""), ("fsdp", KILLED_IN_SAVE)])
def test_other_ranks_end_when_one_is_killed(on_ranks, corpus, whole, tmp_path, parallel, where):
    out = tmp_path / "killed"
    arguments = command(corpus, out, "--parallel", parallel, batch=3)
    code = where + code_of_ranks(arguments, action="0" if where else KILL, at=5)
    ranks = on_ranks(code=code, n=2)
    assert statuses(ranks) == [1, -9], ranks
    assert "a rank ended without an error message" in ranks[0].err
    assert not list(out.glob("training/.tmp-*"))
    load_run(out)
    assert max(int(path.name[-8:]) for path in out.glob("training/state-*")) == 3
    resume_alone(out)
    assert_same(out, whole)


# Kills rank 1 before the run exists in the first attempt, and after step 5 in the second one.
KILLED_TWICE = """
import json, os, signal
from pathlib import Path
import tgen.runs.session as session
attempt = os.environ.pop("TORCHELASTIC_RESTART_COUNT")  # each machine counts its own
def kill():
    print(json.loads((Path({out!r}) / "training/run.json").read_text())["run_id"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == "0" and os.environ["RANK"] == "1":
    session.measure_baselines = lambda prepared: kill()
"""


def test_restarted_ranks_continue_their_own_run(on_ranks, corpus, tmp_path):
    whole, out, code = tmp_path / "whole", tmp_path / "out", tmp_path / "rank.py"
    assert statuses(on_ranks(*[command(corpus, whole)] * 2)) == [0, 0]
    shutil.copytree(whole, out)
    given = command(corpus, out, "--overwrite")
    ranks = code_of_ranks(given, action="attempt == '1' and kill()", at=5)
    code.write_text(KILLED_TWICE.format(out=str(out)) + ranks)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command_line = [sys.executable, *torchrun, "--max-restarts", "2", str(code)]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, env=clean_environment()) as process:
        printed, _ = process.communicate(timeout=900)
    replaced, killed = printed.decode().split()
    assert process.returncode == 0
    assert [run_id(whole), run_id(out)] == [replaced, killed]
    assert replaced != killed
    for name in ("model.safetensors", "training/tokens.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert losses(out) == losses(whole)


def run_id(out: Path) -> str:
    return json.loads((out / "training/run.json").read_bytes())["run_id"]


def test_fine_tuning_on_two_ranks_equals_one_process(on_ranks, corpus, whole, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    shape = dict.fromkeys(("d_model", "n_layers", "n_heads"))
    assert statuses(on_ranks(command(corpus, one, "--from", whole, **shape))) == [0]
    arguments = command(corpus, two, "--from", whole, "--parallel", "fsdp", batch=3, **shape)
    assert statuses(on_ranks(arguments, arguments)) == [0, 0]
    assert_same(two, one)
    (tmp_path / "there").mkdir()
    arguments = command(corpus, tmp_path / "none", "--from", "one")
    folders = [str(tmp_path), str(tmp_path / "there")]
    where = f"import os; os.chdir({folders}[int(os.environ['RANK'])])\n"
    ranks = on_ranks(code=where + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [1, 1]
    assert "one" in error_line(ranks)
    assert not (tmp_path / "none").exists()


def test_lora_on_two_ranks_equals_one_process(on_ranks, corpus, whole, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    more = dict.fromkeys(("d_model", "n_layers", "n_heads"))
    options = ["--from", whole, "--lora", 2]
    assert app.run([str(word) for word in command(corpus, one, *options, **more)]) == 0
    arguments = command(corpus, two, *options, "--parallel", "ddp", batch=3, **more)
    assert statuses(on_ranks(arguments, arguments)) == [0, 0]
    ours, theirs = losses(two), losses(one)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[key] - theirs[key]) for key in ours) <= CLOSE
    assert names(two) == names(one)
    config = model_with_adapter.load(whole).config
    pairs = [adapter.read(folder, config).pairs for folder in (one, two)]
    for name, pair in pairs[0].items():
        assert np.allclose(pair.b, pairs[1][name].b, atol=1e-3), name
    refused = command(corpus, tmp_path / "no", *options, "--parallel", "fsdp", batch=3, **more)
    ranks = on_ranks(refused, refused)
    assert statuses(ranks) == [2, 2]
    assert "--parallel fsdp cannot be combined with LoRA" in error_line(ranks)


def test_ranks_roll_back_together_and_share_a_clock(on_ranks, corpus, tmp_path):
    worse = {"patience": 1, "learning_rate": 30, "optimizer": "adamw", "warmup_steps": 0}
    steps, minutes = (), ("--minutes", 0.02)
    for parallel, more in (("ddp", steps), ("ddp", minutes), ("fsdp", steps)):
        out = tmp_path / f"{parallel}{len(more)}"
        settings = worse | {"eval_every": 2, "accumulation": 2}
        arguments = command(corpus, out, "--parallel", parallel, *more, batch=3, **settings)
        if more:
            at = arguments.index("--steps")
            del arguments[at : at + 2]
        ranks = on_ranks(arguments, arguments)
        assert statuses(ranks) == [0, 0], ranks
        kinds = [record["kind"] for record in log.read(out)]
        assert kinds[-1] == "DoneReport"
        assert more or "RollbackReport" in kinds


def test_rank_that_sees_another_run_is_refused(on_ranks, corpus, whole, tmp_path):
    directories = [tmp_path / name for name in ("here", "there")]
    for directory in directories:
        directory.mkdir()
    shutil.copytree(whole, directories[1] / "out")
    arguments = command(corpus, Path("out"))
    where = f"import os; os.chdir({list(map(str, directories))}[int(os.environ['RANK'])])\n"
    ranks = on_ranks(code=where + code_of_ranks(arguments, action="0", at=-1), n=2)
    assert statuses(ranks) == [1, 1]
    assert "rank 1 does not see the run in out" in error_line(ranks)


def test_ranks_that_differ_are_refused_once(on_ranks, corpus, tmp_path):
    out, there = tmp_path / "out", tmp_path / "there"
    there.mkdir()
    (there / "corpus.txt").write_bytes(VARIED + b"more")
    here = str(corpus.parent)
    where = f"import os; os.chdir([{here!r}, {str(there)!r}][int(os.environ['RANK'])])\n"
    ranks = on_ranks(code=where + code_of_ranks(command("corpus.txt", out), action="0", at=-1), n=2)
    assert statuses(ranks) == [1, 1]
    assert "the corpus differs: " in error_line(ranks)
    version = "import os, tgen.runs.rank_checks as r; r.__version__ += os.environ['RANK']\n"
    ranks = on_ranks(code=version + code_of_ranks(command(corpus, out), action="0", at=-1), n=2)
    assert "the version of tgen differs: " in error_line(ranks)
    ranks = on_ranks(command(corpus, out), command(corpus, out, "--seed", 2))
    assert "the command line differs: " in error_line(ranks)
    assert not out.exists()


def test_impossible_run_is_refused_once_before_training(on_ranks, corpus, tmp_path):
    out = tmp_path / "models" / "out"
    huge = {"d_model": 32768, "n_layers": 100, "n_heads": 64}
    for parallel in ("ddp", "fsdp"):
        arguments = command(corpus, out, "--parallel", parallel, **huge)
        ranks = on_ranks(arguments, arguments)
        assert statuses(ranks) == [2, 2], ranks
        assert "each rank (of 2) needs " in error_line(ranks)
    for arguments, what in (
        (command("-", out), "cannot share stdin"),
        (command("missing.txt", out), "missing.txt does not exist"),
        (command(corpus, out, "--from", "nowhere"), "nowhere"),
        (command(corpus, out, "--parallel", "hsdp"), "needs several machines"),
        (command(corpus, out, "--dry-run"), "--dry-run does not support multiple processes"),
    ):
        assert what in error_line(on_ranks(arguments, arguments))
    assert not out.parent.exists()


def test_batch_size_is_set_per_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_overrides({"batch_size": "3"})[1] == {"batch_size": 12}


def test_parallel_needs_several_processes(corpus, tmp_path):
    assert "RANK" not in os.environ
    request = RunRequest(corpus=[str(corpus)], out=tmp_path / "out", parallel="fsdp")
    with pytest.raises(UsageError, match="--parallel fsdp needs several processes"):
        next(runs.start(request))
    assert not (tmp_path / "out").exists()


def test_distributed_orthogonalization_equals_one_process(on_ranks):
    code = """
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from tgen import distributed
from tgen.training.optimizers import orthogonalize
from tgen.training.parallel import make_mesh, one_rank_per_matrix
with distributed.join_process_group():
    mesh = make_mesh(torch.device("cpu"), "fsdp")
    for n, rows, columns in ((5, 6, 4), (1, 7, 9), (2, 4, 4)):
        stack = torch.randn(n, rows, columns, generator=torch.Generator().manual_seed(n))
        wanted = orthogonalize(stack)
        close = dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one_rank_per_matrix(orthogonalize, mesh)(stack), wanted, **close)
        for axis in (0, 1, 2):
            shares = distribute_tensor(stack, mesh, [Shard(axis)])
            done = one_rank_per_matrix(orthogonalize, mesh)(shares)
            assert done.placements == shares.placements
            torch.testing.assert_close(done.full_tensor(), wanted, **close)
"""
    ranks = on_ranks(code=code, n=3)
    assert statuses(ranks) == [0, 0, 0], ranks
