"""The compiled samplers choose the tokens that the samplers in numpy choose."""

import subprocess
import sys

import numpy as np
import pytest

from tgen.config import SamplingConfig
from tgen.engine.cpu.kernel_cache import enter_function
from tgen.errors import ModelError
from tgen.generation import sample as sampler
from tgen.generation.sample import describe, sample

SETTINGS = [
    {},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 500},
    {"top_k": 2**63 - 1},
    {"top_k": 0, "top_p": 0.95},
    {"top_k": 0, "top_p": 1e-9},
    {"top_k": 30, "top_p": 0.5},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 0, "min_p": 1.0},
    {"top_k": 0, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
    {"top_k": 0, "temperature": 30.0},
    {"temperature": 0.01},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
]


def make_rows(kind: str) -> np.ndarray:
    """20 rows of logits; most vocabularies do not fill whole vectors."""
    random = np.random.default_rng(0)
    n = {"small": 7, "one": 1}.get(kind, 3001)
    scale = {"flat": 0.01, "peaked": 12.0}.get(kind, 2.0)
    rows = (random.standard_normal((20, n)) * scale).astype(np.float32)
    if kind == "ties":
        rows = np.round(rows)
    if kind == "banned":
        rows[random.random(rows.shape) < 0.99] = -np.inf
        rows[:, 5] = 1.0
    return rows


@pytest.fixture
def without_kernels(monkeypatch):
    enter_function()

    def switch():
        monkeypatch.setattr(sampler, "row_sampler", lambda: None)

    return switch


@pytest.mark.parametrize("kind", ["usual", "flat", "peaked", "ties", "banned", "small", "one"])
def test_tokens_equal_those_of_numpy(kind, without_kernels):
    rows = make_rows(kind)
    drawn = []
    for _ in range(2):
        tokens = []
        for values in SETTINGS:
            config = SamplingConfig(**values)
            for seed in (*range(9), 2**63 - 1):
                numbers = [seed] * len(rows), list(range(len(rows)))
                tokens.append(sample(rows, config, seeds=numbers[0], positions=numbers[1]))
        drawn.append(tokens)
        without_kernels()
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn[0]))) > 1 or kind == "one"


def test_sampling_needs_no_compiler():
    """llvmlite is not installed everywhere."""
    program = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from tgen.engine.cpu.row_sampler import row_sampler\n"
        "import tgen.generation.loop\n"
        "assert row_sampler() is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rows_do_not_depend_on_each_other():
    enter_function()
    rows, config = make_rows("usual"), SamplingConfig(top_k=0)
    together = sample(rows, config, seeds=[3] * 20, positions=[8] * 20)
    alone = [sample(row[None], config, seeds=[3], positions=[8])[0] for row in rows]
    assert together == alone
    view = np.concatenate([rows, rows], axis=1)[:, :3001]
    assert sample(view, config, seeds=[3] * 20, positions=[8] * 20) == together


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 2500, 3000])
def test_logits_that_are_not_finite_are_an_error(value, place):
    enter_function()
    rows = make_rows("usual")
    rows[4, place] = value
    with pytest.raises(ModelError, match="not finite"):
        sample(rows, SamplingConfig(), seeds=[0] * 20, positions=[0] * 20)


@pytest.mark.parametrize("kind", ["usual", "flat", "peaked", "ties", "banned", "small", "one"])
def test_descriptions_equal_those_of_numpy(kind, without_kernels):
    rows = make_rows(kind)
    ids = [int(row.argsort()[-1 - i % row.size]) for i, row in enumerate(rows)]
    if kind == "banned":
        ids = rows.argmax(axis=1).tolist()
    compiled = describe(rows, ids)
    without_kernels()
    for ours, theirs in zip(compiled, describe(rows, ids), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
        assert ours[1] == theirs[1]
        assert ours[2] == pytest.approx(theirs[2], abs=1e-5)
