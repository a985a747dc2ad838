"""A small random model of each family, one that was really trained, the command as a process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.command import clean_environment, tgen
from support.models import ALL_FAMILIES, TEXT, make_model
from tgen.checkpoint import model_dir
from tgen.tokenizer import Tokenizer, train_bpe

os.environ.setdefault("HF_HUB_OFFLINE", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
torch.set_num_threads(1)  # tests' models are too small for two

Ranks = Callable[..., list[SimpleNamespace]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=300)


@pytest.fixture(params=[name for name in ALL_FAMILIES if name != "qwen2"])  # a llama with biases
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model_directory(family: str, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A random model of the family, saved."""
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / family, model.config, tokenizer, model.to_arrays())
    return tmp_path / family


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the command itself trained, for a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_bytes(TEXT)
    result = tgen(
        "train",
        folder / "corpus.txt",
        "--steps",
        30,
        "--out",
        folder / "model",
        "--tokenizer",
        "bpe",
        "--vocab-size",
        300,
        "--set",
        "d_model=32",
        "--set",
        "context_length=32",
        "--set",
        "eval_every=10",
    )
    assert result.returncode == 0, result.stderr.decode()
    return folder / "model"


@pytest.fixture
def inspect(
    trained: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., SimpleNamespace]:
    """Runs `tgen inspect` in this process, on a text and a model, unless others are given."""
    from tgen.cli.app import run

    def run_here(
        *arguments: object, model: Path | None = trained, prompt: str = "What is the king?"
    ) -> SimpleNamespace:
        models = [] if model is None else ["-m", str(model)]
        status = run(["inspect", *models, "-p", prompt, *map(str, arguments)])
        out, err = capsysbinary.readouterr()
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    return run_here


@pytest.fixture
def random_ids() -> Callable[[int], list[int]]:
    return lambda n: np.random.default_rng(n).integers(0, 300, n).tolist()


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, Path(__file__).parent / "support" / "ranks.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def on_ranks(server, tmp_path) -> Ranks:
    """Runs the arguments of each rank, or the same code on `n`; what each of them did."""

    def run(*arguments: list[object], code: str = "", n: int = 0) -> list[SimpleNamespace]:
        listed = [[str(one) for one in rank] for rank in arguments]
        asked = {"arguments": listed, "code": code, "n": n, "folder": str(tmp_path)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        ends = json.loads(server.stdout.readline())
        found = [
            SimpleNamespace(
                status=status,
                out=(tmp_path / f"{rank}.out").read_bytes(),
                err=(tmp_path / f"{rank}.err").read_text(),
            )
            for rank, status in enumerate(ends)
        ]
        for rank, it in enumerate(found):  # pytest shows it where a test fails
            sys.stdout.write(f"rank {rank} ended with {it.status}\n{it.err}")
        return found

    return run
