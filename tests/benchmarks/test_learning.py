"""The learning benchmark's scorer against known values, and that both sides hold out one text."""

import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tgen import corpus
from tgen.errors import CorpusError, UsageError

LEARNING = Path(__file__).parents[2] / "benchmarks" / "learning"
sys.path.insert(0, str(LEARNING))
import nanogpt  # noqa: E402
from scoring import Predictor, bits_per_byte, windows  # noqa: E402
from versus_nanogpt import common_held_out, summarise  # noqa: E402

VOCABULARY = 8


def counted(data: bytes) -> np.ndarray:
    """A byte a token."""
    return np.frombuffer(data, np.uint8).astype(np.int64) % VOCABULARY


def pairs(data: bytes) -> np.ndarray:
    """Two bytes a token."""
    return np.frombuffer(data, np.uint8)[::2].astype(np.int64) % VOCABULARY


def uniform(tokens: Tensor) -> Tensor:
    return torch.zeros(*tokens.shape, VOCABULARY)


def test_a_uniform_model_costs_log2_of_its_vocabulary_a_token():
    model = Predictor(encode=pairs, logits=uniform, context_length=5)
    bits = bits_per_byte(model, b"before", b"held out text " * 7)
    assert bits == pytest.approx(math.log2(VOCABULARY) / 2)


def test_a_token_is_predicted_from_those_before_it():
    def counting(tokens: Tensor) -> Tensor:  # the next token is one more, with odds of 4 to 1
        following = (tokens + 1) % VOCABULARY
        return torch.nn.functional.one_hot(following, VOCABULARY) * math.log(4.0)

    model = Predictor(counted, counting, 5)
    expected = math.log2((4 + VOCABULARY - 1) / 4)
    assert bits_per_byte(model, bytes([7]), bytes(range(30))) == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 5, 6, 7, 11, 20_001])
def test_windows_predict_every_token_once(n):
    stream = np.arange(n)
    batches = list(windows(stream, 5))
    assert np.concatenate([b[:, 1:].ravel() for b in batches]).tolist() == stream[1:].tolist()
    assert all((b[:, 0] + 1 == b[:, 1]).all() for b in batches)


def test_a_model_that_looks_ahead_is_found_out():
    def peeking(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens.roll(-1, 1), VOCABULARY) * 5.0

    model = Predictor(counted, peeking, 6)
    with pytest.raises(AssertionError, match="token by token"):
        bits_per_byte(model, b"a", bytes(range(40)))


@pytest.mark.parametrize("text", ["plain ASCII " * 99 + "x" * 7, "naïve 日本 🦋 " * 400])
def test_the_common_text_is_held_out_by_both(text):
    data = text.encode()
    common = common_held_out(data)
    (document,) = corpus.train_val_split(corpus.Corpus([(data,)], frozenset(), []), 0.1).held_out
    for theirs in (document[0], nanogpt.held_out(text)):
        assert theirs.endswith(common)
        assert len(theirs) - len(common) <= 16


def test_uneven_texts_are_refused():
    with pytest.raises(CorpusError, match="holds out"):
        common_held_out(("a" * 5000 + "日" * 5000).encode())
    with pytest.raises(CorpusError, match="not UTF-8"):
        common_held_out(b"\xff" * 1000)


def test_nanogpt_reads_the_whole_text_from_its_workspace(tmp_path):
    text = "naïve 日本 🦋 and more\n" * 20
    checkout, folder = tmp_path / "checkout", tmp_path / "work"
    with pytest.raises(UsageError, match=r"no nanoGPT checkout: it lacks train\.py"):
        nanogpt.workspace(checkout, folder, text)
    for name in ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("torch.manual_seed(1337 + seed_offset)\n")
    nanogpt.workspace(checkout, folder, text)
    data = folder / "data" / "corpus"
    meta = pickle.loads((data / "meta.pkl").read_bytes())
    ids = [np.fromfile(data / f"{part}.bin", np.uint16) for part in ("train", "val")]
    assert "".join(meta["itos"][i] for i in np.concatenate(ids).tolist()) == text
    assert "".join(meta["itos"][i] for i in ids[1].tolist()).encode() == nanogpt.held_out(text)
    assert meta["vocab_size"] == len(set(text))
    assert nanogpt.command(folder, 7, 50)[1] == "train_7.py"
    assert (folder / "train_7.py").read_text() == "torch.manual_seed(7 + seed_offset)\n"


def test_arms_are_compared_with_nanogpt_of_the_same_seed():
    def run(arm: str, seed: int, seconds: float, bits: float) -> dict[str, object]:
        return {"arm": arm, "seed": seed, "wall_seconds": seconds, "bits_per_byte": bits}

    rows = [run("nanoGPT", 1, 90, 2.7), run("t", 1, 30, 2.5), run("nanoGPT", 2, 60, 2.6)]
    row = summarise([*rows, run("t", 2, 30, 2.65)])["t"]
    assert row["share_of_time"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert row["bits_saved"] == pytest.approx((0.2 - 0.05) / 2)
    assert row["as_good_as_nanogpt"] == 1
