"""Packed documents do not see each other, and only tokens in the loss mask are trained on."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import tokenize, tokenize_counting
from support.models import make_model
from support.runs import dry_run, load_run, resume
from tgen import corpus, runs
from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig, TrainConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.errors import CorpusError
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer
from tgen.reports.training import EvalReport, StepReport
from tgen.tokenizer import train_char
from tgen.training.evaluation import evaluate
from tgen.training.loop import train
from tgen.training.loss import LossModule
from tgen.training.state import TrainState, new_state

CHAR = train_char([b"abc"])
ROWS = [(b"ab", b"c"), (b"b", b"ca"), (b"", b"abc"), (b"cab", b"")]
END = CHAR.end_of_text


def make_dataset(
    rows: list[tuple[bytes, ...]], context_length: int, batch_size: int = 2
) -> TokenDataset:
    """The rows are both the training and the validation split."""
    text, n_bytes, _ = tokenize_counting(rows, CHAR)
    return TokenDataset(
        text,
        text,
        val_bytes=n_bytes,
        context_length=context_length,
        batch_size=batch_size,
        seed=3,
        end_of_text=END,
    )


def loss_unpacked(model: Transformer, batch: corpus.Batch) -> tuple[float, int]:
    """Total loss in nats of a batch with one forward pass per document, and the target tokens."""
    tokens, loss_mask, documents = batch
    assert loss_mask is not None
    assert documents is not None
    nats, n = 0.0, 0
    for row in range(len(tokens)):
        for document in np.unique(documents[row]):
            here = documents[row] == document
            inputs = torch.from_numpy(tokens[row, :-1][here])
            with torch.no_grad():
                log_p = model(inputs[None])[0].double().log_softmax(-1).numpy()
            mask = loss_mask[row][here]
            nats -= log_p[np.arange(len(inputs)), tokens[row, 1:][here]][mask].sum()
            n += int(mask.sum())
    return nats, n


def test_logits_of_packed_documents_equal_those_of_each_alone(family):
    model = make_model(family).double()
    tokens = torch.randint(300, (2, 30), generator=torch.Generator().manual_seed(1))
    lengths = [[7, 1, 22], [12, 18]]
    documents = torch.tensor(
        [[i for i, length in enumerate(row) for _ in range(length)] for row in lengths],
        dtype=torch.int32,
    )
    with torch.no_grad():
        packed = model(tokens, documents=documents)
        for row, parts in enumerate(lengths):
            each = [model(part[None])[0] for part in tokens[row].split(parts)]
            assert (packed[row] - torch.cat(each)).abs().max() <= 1e-9
        one = model(tokens, documents=torch.zeros(2, 30, dtype=torch.int32))
        assert (one - model(tokens)).abs().max() <= 1e-9


def test_documents_and_a_kv_cache_are_mutually_exclusive():
    model = make_model("qwen3")
    cache = KVCache(model.config, 1, device=torch.device("cpu"), dtype=torch.float32)
    documents = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(AssertionError):
        model(torch.arange(4)[None], cache=cache, documents=documents)


def test_loss_mask_covers_completions_with_their_end_and_whole_texts():
    text, n_bytes, _ = tokenize_counting([(b"ab", b"c"), (b"ab",)], CHAR)
    assert text.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert n_bytes == 3
    everywhere, n_bytes, _ = tokenize_counting([(b"ab", b"c"), (b"ab",)], CHAR, loss_on="all")
    assert everywhere.loss_mask is None
    assert n_bytes == 5
    assert tokenize([(b"ab",), (b"c",)], CHAR).loss_mask is None


def test_every_other_document_sees_the_end_of_text_before_it():
    (batch,) = make_dataset([(b"ab", b"c"), (b"b", b"ca")] * 2, 8).val_windows(100)
    a, b, c = CHAR.encode(b"abc")
    assert batch.tokens.tolist() == [[END, a, b, c, END, b, c, a, END]] * 2
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 1, 1, 0, 1, 1, 1]] * 2


def test_windows_within_a_document_have_no_document_numbers():
    dataset = make_dataset([(b"abc" * 20,)], 8)
    inside = [batch for batch in map(dataset.batch, range(20)) if END not in batch.tokens[:, :-1]]
    assert inside
    assert all(batch.documents is None for batch in inside)


@given(st.lists(st.booleans(), min_size=1, max_size=99), st.integers(1, 9))
@settings(deadline=None)
def test_each_validation_token_in_the_loss_is_predicted_exactly_once(loss_mask, context_length):
    val = np.arange(10, 10 + len(loss_mask), dtype=np.uint16)
    dataset = TokenDataset(
        train=Tokens(np.arange(10, dtype=np.uint16)),
        val=Tokens(val, np.array(loss_mask)),
        val_bytes=1,
        context_length=context_length,
        batch_size=1,
        seed=0,
    )
    batches = list(dataset.val_windows(1 << 20))
    predicted = np.concatenate([[0], *(batch.tokens[:, 1:][batch.loss_mask] for batch in batches)])
    assert predicted[1:].tolist() == val[loss_mask].tolist()
    assert dataset.val.n_targets == sum(loss_mask)


def test_loss_of_packed_windows_equals_that_of_unpacked_documents(family):
    model = make_model(family, context_length=12).train()
    dataset = make_dataset(ROWS * 3, 12, batch_size=3)
    assert dataset.batch(0).documents is not None
    nats, n = loss_unpacked(model, dataset.batch(0))
    config = ResolvedTrainConfig(steps=1, batch_size=3, eval_every=9)
    step = next(train(model, dataset, config, TrainState(model, config)))
    assert isinstance(step, StepReport)
    assert step.loss == pytest.approx(nats / n, rel=1e-5)


def test_bits_per_byte_are_of_the_completions(family):
    model = make_model(family)
    dataset = make_dataset(ROWS, 48)
    (batch,) = dataset.val_windows(100)
    nats, n = loss_unpacked(model, batch)
    loss, bits, *_ = evaluate(LossModule(model), dataset)
    assert n == 10  # six bytes and four ends
    assert loss == pytest.approx(nats / n, rel=1e-5)
    assert bits == pytest.approx(nats / np.log(2) / 6, rel=1e-5)


def test_batch_without_targets_changes_no_parameter():
    model = make_model("qwen3", context_length=12)
    before = model.to_arrays()
    dataset = make_dataset([(b"ab" * 40, b"c")], 12)
    without_targets = next(step for step in range(9) if not dataset.batch(step).loss_mask.any())
    config = ResolvedTrainConfig(
        steps=without_targets + 1, batch_size=2, weight_decay=0.0, eval_every=99
    )
    state = TrainState(model, config)
    state.progress.step = without_targets
    step = next(train(model, dataset, config, state))
    assert step.loss == 0
    assert all(np.array_equal(before[name], after) for name, after in model.to_arrays().items())


def request(folder, name="model", **overrides: str) -> runs.RunRequest:
    return runs.RunRequest(
        corpus=[str(folder / "rows.jsonl")],
        out=folder / name,
        family="classic",  # its attention matters before training
        size="tiny",
        train=TrainConfig(steps=4, batch_size=2, val_fraction=0.25, eval_every=2),
        overrides={
            "d_model": "16",
            "n_layers": "1",
            "context_length": "48",
            "dropout": "0",
            "precision": "float32",
        }
        | overrides,
        threads=1,
    )


@pytest.fixture
def rows(tmp_path):
    pairs = [{"prompt": f"after {i} comes ", "completion": str(i + 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


def test_resumed_run_on_rows_equals_uninterrupted_run(rows):
    whole = list(runs.start(request(rows, "whole")))
    pauses = iter([False, False, True])
    list(runs.start(request(rows, "paused"), stopped=lambda: next(pauses)))
    resumed = list(resume(rows / "paused", threads=1))
    assert [r.bits_per_byte for r in resumed if isinstance(r, EvalReport)][-1] == [
        r.bits_per_byte for r in whole if isinstance(r, EvalReport)
    ][-1]
    weights = [rows / name / "model.safetensors" for name in ("whole", "paused")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def first_loss(request: runs.RunRequest) -> float | None:
    return next(r.loss for r in runs.start(request) if isinstance(r, StepReport))


def test_loss_on_sets_the_loss_mask_saved_with_the_run(rows):
    losses = [first_loss(request(rows, name, loss_on=name)) for name in ("completion", "all")]
    assert losses[0] != losses[1]
    run, tokens = load_run(rows / "completion")
    assert set(tokens) == {"train", "val", "train_loss_mask", "val_loss_mask"}
    assert run["held_out_bytes"] == 10 * 2  # of the answers 31 to 40
    dataset = TokenDataset(
        *corpus.tokens_of(tokens),
        end_of_text=END,
        val_bytes=20,
        context_length=48,
        batch_size=2,
        seed=1337,
    )
    config = ModelConfig(**run["plan"]["model"])
    untrained = new_state(
        config, ResolvedTrainConfig(**run["plan"]["train"]), torch.device("cpu")
    ).model
    nats, n = loss_unpacked(untrained, dataset.batch(0))
    assert losses[0] == pytest.approx(nats / n, rel=1e-5)
    run, tokens = load_run(rows / "all")
    assert set(tokens) == {"train", "val"}
    assert run["held_out_bytes"] == 10 * len("after 30 comes 31")


def test_rows_without_completions_are_an_error(tmp_path):
    lines = [json.dumps({"prompt": f"abc{i}", "completion": ""}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run = runs.RunRequest(corpus=[str(tmp_path / "rows.jsonl")], out=tmp_path / "model")
    with pytest.raises(CorpusError, match="the corpus has no completions"):
        dry_run(run)
