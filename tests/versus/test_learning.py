"""The scorer of the learning benchmarks equals known values; both sides hold out the same text."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.corpora import make_corpus
from tgen import corpus
from tgen.errors import CorpusError, UsageError
from versus.learning import nanogpt
from versus.learning.scoring import Predictor, bits_per_byte, windows
from versus.learning.versus_nanogpt import summarize, validation_text

VOCABULARY = 8


def encode_bytes(data: bytes) -> np.ndarray:
    """One token per byte."""
    return np.frombuffer(data, np.uint8).astype(np.int64) % VOCABULARY


def encode_pairs(data: bytes) -> np.ndarray:
    """One token per two bytes."""
    return np.frombuffer(data, np.uint8)[::2].astype(np.int64) % VOCABULARY


def uniform_logits(tokens: Tensor) -> Tensor:
    return torch.zeros(*tokens.shape, VOCABULARY)


def test_uniform_model_costs_log2_of_its_vocabulary_per_token() -> None:
    model = Predictor(encode=encode_pairs, logits=uniform_logits, context_length=5)
    bits = bits_per_byte(model, b"before", b"held out text " * 7)
    assert bits == pytest.approx(math.log2(VOCABULARY) / 2)


def test_tokens_are_predicted_from_earlier_tokens() -> None:
    def predict_successor(tokens: Tensor) -> Tensor:
        """Make the next number 4 times as likely as each other token."""
        following = (tokens + 1) % VOCABULARY
        return torch.nn.functional.one_hot(following, VOCABULARY) * math.log(4.0)

    model = Predictor(encode_bytes, predict_successor, 5)
    expected = math.log2((4 + VOCABULARY - 1) / 4)
    assert bits_per_byte(model, bytes([7]), bytes(range(30))) == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 5, 6, 7, 11, 20_001])
def test_windows_predict_every_token_once(n: int) -> None:
    stream = np.arange(n)
    batches = list(windows(stream, 5))
    assert np.concatenate([b[:, 1:].ravel() for b in batches]).tolist() == stream[1:].tolist()
    assert all((b[:, 0] + 1 == b[:, 1]).all() for b in batches)


def test_model_that_looks_ahead_is_detected() -> None:
    def look_ahead(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens.roll(-1, 1), VOCABULARY) * 5.0

    model = Predictor(encode_bytes, look_ahead, 6)
    with pytest.raises(AssertionError, match="token by token"):
        bits_per_byte(model, b"a", bytes(range(40)))


@pytest.mark.parametrize(
    "text", ["plain ASCII " * 99 + "x" * 7, "naïve 日本 🦋 " * 400, "a" * 5000 + "日" * 5003]
)
def test_both_sides_hold_out_the_same_text(text: str) -> None:
    data = text.encode()
    theirs = validation_text(data)
    fraction = float(f"{len(theirs) / len(data)}")
    (document,) = corpus.split_train_val(make_corpus([(data,)]), fraction)[1]  # type: ignore[no-untyped-call]
    assert document == (theirs,)


def test_unsuitable_texts_are_errors() -> None:
    with pytest.raises(CorpusError, match="not UTF-8"):
        validation_text(b"\xff" * 1000)
    with pytest.raises(CorpusError, match="several documents"):
        validation_text(b"one<|endoftext|>two")


def test_nanogpt_workspace_contains_the_whole_text(tmp_path: Path) -> None:
    text = "naïve 日本 🦋 and more\n" * 20
    checkout, folder = tmp_path / "checkout", tmp_path / "work"
    with pytest.raises(UsageError, match=r"not a nanoGPT checkout: train\.py"):
        nanogpt.make_workspace(checkout, folder, text)
    for name in ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("torch.manual_seed(1337 + seed_offset)\n")
    nanogpt.make_workspace(checkout, folder, text)
    data = folder / "data" / "corpus"
    meta = pickle.loads((data / "meta.pkl").read_bytes())
    ids = [np.fromfile(data / f"{part}.bin", np.uint16) for part in ("train", "val")]
    assert "".join(meta["itos"][i] for i in np.concatenate(ids).tolist()) == text
    assert "".join(meta["itos"][i] for i in ids[1].tolist()).encode() == nanogpt.validation_text(
        text
    )
    assert meta["vocab_size"] == len(set(text))
    assert nanogpt.train_command(folder, 7, 50)[1] == "train_7.py"
    assert (folder / "train_7.py").read_text() == "torch.manual_seed(7 + seed_offset)\n"


def test_runs_are_compared_with_nanogpt_of_the_same_seed() -> None:
    def run(side: str, seed: int, seconds: float, bits: float) -> dict[str, object]:
        return {"side": side, "seed": seed, "wall_seconds": seconds, "bits_per_byte": bits}

    rows = [run("nanoGPT", 1, 90, 2.7), run("t", 1, 30, 2.5), run("nanoGPT", 2, 60, 2.6)]
    row = summarize([*rows, run("t", 2, 30, 2.65)])["t"]
    assert row["time_ratio"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert row["bits_per_byte_gain"] == pytest.approx((0.2 - 0.05) / 2)
    assert row["n_as_good"] == 1
