"""Fixtures: small random models, a trained model, in-process `tgen inspect`, code on ranks."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy: waiting threads would spin

from support.browser import browser
from support.command import fork_server, tgen
from support.families import DISTINCT
from support.workers import WITH_BROWSER, run_in_workers

if TYPE_CHECKING:
    import typer

    from tgen.tokenizer import Tokenizer

__all__ = ["browser"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
os.environ.pop("COLUMNS", None)  # Rich's consoles keep what is set when they are made
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

Ranks = Callable[..., list[SimpleNamespace]]


# Modules that take long begin first: a worker that starts one at the end keeps the others waiting.
LONG = ["test_faults", "test_parallel", "test_fake_cuda", "test_quick", "test_kernel_cache"]
LONG += ["test_signals", "test_resume", "test_session", "test_errors", "test_docs"]
LONG += ["test_early_stopping", *WITH_BROWSER]


gc.disable()  # no garbage is made until all tests are imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="number of processes for the tests")


def pytest_collection() -> None:
    import hypothesis
    import torch

    torch.set_num_threads(1)  # OpenMP's threads would be missing in forked processes
    # On a busy machine, anything may take long.
    patient: Any = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("fixed", derandomize=True, max_examples=50, **patient)
    hypothesis.settings.register_profile("fresh", max_examples=1000, print_blob=True, **patient)
    # Other examples every time: see scripts/faults.
    fresh = os.environ.get("TGEN_FRESH_EXAMPLES")
    hypothesis.settings.load_profile("fresh" if fresh else "fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes if that was asked for."""
    options = session.config.option
    if session.testsfailed or options.collectonly or options.processes == 1:
        if hasattr(os, "fork"):
            fork_server()
        return None  # pytest goes on
    run_in_workers(session, options.processes)
    return True


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at the modules and tests, of which there are millions."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Give every test the same random numbers, one thread and its own width of the terminal,
    whatever ran before."""
    import torch

    from tgen.cli import rich_console as consoles

    consoles.out._width = consoles.err._width = None
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are too small for more


@pytest.fixture(scope="session", autouse=True)
def _seeding_notes_no_calls() -> Iterator[None]:
    """Seed what is there only: for a GPU to come, torch notes the call's stack, in milliseconds."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _assumed_speed() -> Iterator[None]:
    """Assume a training speed in this process: measuring takes longer than training a tiny model.

    Commands that start a new Python measure it.
    """
    from tgen.runs import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "measure_speed", lambda *_, **__: 2e10)
        patch.setattr(prepare, "measure_step", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_samples() -> Iterator[None]:
    """Generate short samples in training runs: otherwise they take longer than the steps."""
    from tgen.planning import side_work
    from tgen.runs import forgetting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forgetting, "TEXT_TOKENS", 4)
        patch.setattr(side_work, "SAMPLE_TOKENS", 4)
        patch.setattr(side_work, "MEMORIZATION_SAMPLES", 2)
        patch.setattr(side_work, "MEMORIZATION_TOKENS", 8)
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Make a command from its function once: it takes longer than many a command runs."""
    import typer

    from tgen.cli import app

    make_app = cache(app.make_app)

    def make_once(arguments: Sequence[str] = tuple(app.COMMANDS)) -> "typer.Typer":
        return make_app(tuple(name for name in app.COMMANDS if name in arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "make_app", make_once)
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _memory_limit_is_read_once() -> Iterator[None]:
    """Read this process's memory limits once: opening a tiny model takes less time."""
    from tgen.machine import control_groups, memory

    root, read = Path("/"), control_groups.free_memory
    free = read(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda where: free if where == root else read(where))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    from support.models import TEXT
    from tgen.tokenizer import train_bpe

    return train_bpe([TEXT], vocab_size=300)


@pytest.fixture(params=[name for name in DISTINCT if name != "qwen2"])  # llama with biases
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model_directory(family: str, tokenizer: "Tokenizer", tmp_path: Path) -> Path:
    """Return the directory of a random model of the family."""
    from support.models import make_model
    from tgen.checkpoint import model_dir

    model = make_model(family, vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / family, model.config, tokenizer, model.to_arrays())
    return tmp_path / family


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory that `tgen train` made in 30 steps."""
    from support.models import TEXT

    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_bytes(TEXT)
    paths = [folder / "corpus.txt", "--out", folder / "model"]
    options = ["--steps", 30, "--tokenizer", "bpe", "--vocab-size", 300]
    settings = ["--set=d_model=32", "--set=context_length=32", "--set=eval_every=10"]
    result = tgen("train", *paths, *options, *settings)
    assert result.returncode == 0, result.stderr.decode()
    return folder / "model"


@pytest.fixture(scope="session")
def draft_model(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random model with the tokens of the trained one, but smaller."""
    from support.models import make_model
    from tgen.checkpoint import model_dir

    tokenizer = model_dir.load(trained).tokenizer
    model = make_model("llama", vocab_size=tokenizer.vocab_size, n_layers=1, d_model=16)
    path = tmp_path_factory.mktemp("draft") / "model"
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    return path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, `model`, and its corpus, which no test may change."""
    from support.runs import request as run_request
    from tgen import runs

    folder = tmp_path_factory.mktemp("finished")
    list(runs.start(run_request(folder)))
    return folder


@pytest.fixture
def finished(finished_run: Path, tmp_path: Path) -> Path:
    """Return the directory of a copy of a finished run, whose corpus is beside it."""
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model"


@pytest.fixture
def run_here(capsysbinary: pytest.CaptureFixture[bytes]) -> Callable[..., SimpleNamespace]:
    """Run the command in this process, in the directory `cwd`."""
    from tgen.cli.app import run

    def run_command(*arguments: object, cwd: Path | str = ".") -> SimpleNamespace:
        with chdir(cwd):
            status = run([str(word) for word in arguments])
        out, err = capsysbinary.readouterr()
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    return run_command


@pytest.fixture
def inspect(
    trained: Path, run_here: Callable[..., SimpleNamespace]
) -> Callable[..., SimpleNamespace]:
    """Run `tgen inspect` in this process, by default on a fixed prompt and the trained model."""

    def run_inspect(
        *arguments: object, model: Path | None = trained, prompt: str | None = "What is the king?"
    ) -> SimpleNamespace:
        models = [] if model is None else ["-m", model]
        text = [] if prompt is None else ["-p", prompt]
        return run_here("inspect", *models, *text, *arguments)

    return run_inspect


@pytest.fixture
def random_ids() -> Callable[[int], list[int]]:
    import numpy as np

    return lambda n: np.random.default_rng(n).integers(0, 300, n).tolist()


@pytest.fixture
def on_ranks(tmp_path) -> Ranks:
    """Run a command per rank, or the same code on `n` ranks; return each status, out and err."""

    def run(*arguments: list[object], code: str = "", n: int = 0) -> list[SimpleNamespace]:
        commands = [[str(word) for word in command] for command in arguments]
        statuses = fork_server().run(commands, code=code, n=n, folder=tmp_path)
        results = [
            SimpleNamespace(
                status=status,
                out=(tmp_path / f"{rank}.out").read_bytes(),
                err=(tmp_path / f"{rank}.err").read_text(),
            )
            for rank, status in enumerate(statuses)
        ]
        for rank, result in enumerate(results):  # pytest shows this if the test fails
            sys.stdout.write(f"rank {rank} ended with {result.status}\n{result.err}")
        return results

    return run
