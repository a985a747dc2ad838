"""Documents that share a window are as if each were alone, and only what is scored is learnt."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models import make_model
from support.runs import resume
from tgen import corpus, runs
from tgen.config import ModelConfig, TrainConfig
from tgen.corpus import TokenDataset
from tgen.errors import CorpusError
from tgen.model.kv_cache import KVCache
from tgen.model.transformer import Transformer
from tgen.reports import EvalReport, StepReport
from tgen.runs.storage import state as run_state
from tgen.tokenizer import train_char
from tgen.training.evaluation import LossModule, evaluate
from tgen.training.loop import train
from tgen.training.state import TrainState, new_state

CHAR = train_char([b"abc"])
ROWS = [(b"ab", b"c"), (b"b", b"ca"), (b"", b"abc"), (b"cab", b"")]
END = CHAR.end_of_text


def store_of(
    rows: list[tuple[bytes, ...]], context_length: int, batch_size: int = 2
) -> TokenDataset:
    """The rows both to train on and held out."""
    text = corpus.tokenize(rows, CHAR)
    return TokenDataset(
        **corpus.arrays(text, text),
        held_out_bytes=text.scored_bytes,
        context_length=context_length,
        batch_size=batch_size,
        seed=3,
        end_of_text=END,
    )


def alone(model: Transformer, batch: corpus.Batch) -> tuple[float, int]:
    """Nats of a batch's scored targets, each document of each row given to the model by itself,
    and the number of these targets."""
    tokens, scored, documents = batch
    nats, n = 0.0, 0
    for row in range(len(tokens)):
        for document in np.unique(documents[row]):
            here = documents[row] == document
            inputs = torch.from_numpy(tokens[row, :-1][here])
            with torch.no_grad():
                log_p = model(inputs[None])[0].double().log_softmax(-1).numpy()
            counted = scored[row][here]
            nats -= log_p[np.arange(len(inputs)), tokens[row, 1:][here]][counted].sum()
            n += int(counted.sum())
    return nats, n


def test_logits_of_packed_documents_are_those_of_each_alone(family):
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


def test_documents_and_a_cache_exclude_each_other():
    model = make_model("qwen3")
    cache = KVCache(model.config, 1, device=torch.device("cpu"), dtype=torch.float32)
    documents = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(AssertionError):
        model(torch.arange(4)[None], cache=cache, documents=documents)


def test_only_completions_and_what_ends_them_are_scored_and_a_text_whole():
    text = corpus.tokenize([(b"ab", b"c"), (b"ab",)], CHAR)
    assert text.scored.astype(int).tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert text.scored_bytes == 3
    everywhere = corpus.tokenize([(b"ab", b"c"), (b"ab",)], CHAR, loss_on="all")
    assert everywhere.scored is None
    assert everywhere.scored_bytes == 5
    assert corpus.tokenize([(b"ab",), (b"c",)], CHAR).scored is None


def test_every_other_document_sees_the_end_of_text_before_it():
    (batch,) = store_of([(b"ab", b"c"), (b"b", b"ca")] * 2, 8).held_out_windows(100)
    a, b, c = CHAR.encode(b"abc")
    assert batch.tokens.tolist() == [[END, a, b, c, END, b, c, a, END]] * 2
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert batch.scored.astype(int).tolist() == [[0, 0, 1, 1, 0, 1, 1, 1]] * 2


def test_windows_without_a_border_are_left_as_they_are():
    batches = store_of([(b"abc" * 20,)], 8)
    inside = [batch for batch in map(batches.batch, range(20)) if END not in batch.tokens[:, :-1]]
    assert inside
    assert all(batch.documents is None and batch.scored is None for batch in inside)


@given(st.lists(st.booleans(), min_size=1, max_size=99), st.integers(1, 9))
@settings(deadline=None)
def test_each_scored_held_out_token_is_predicted_exactly_once(scored, context_length):
    held_out = np.arange(10, 10 + len(scored), dtype=np.uint16)
    store = TokenDataset(
        train=np.arange(10, dtype=np.uint16),
        held_out=held_out,
        held_out_bytes=1,
        context_length=context_length,
        batch_size=1,
        seed=0,
        held_out_scored=np.array(scored),
    )
    batches = list(store.held_out_windows(1 << 20))
    found = np.concatenate([[0], *(batch.tokens[:, 1:][batch.scored] for batch in batches)])
    assert found[1:].tolist() == held_out[scored].tolist()
    assert store.held_out_tokens == sum(scored)


def test_the_loss_of_packed_windows_is_that_of_their_documents_alone(family):
    model = make_model(family, context_length=12).train()
    store = store_of(ROWS * 3, 12, batch_size=3)
    assert store.batch(0).documents is not None
    nats, n = alone(model, store.batch(0))
    config = TrainConfig(steps=1, batch_size=3, eval_every=9)
    step = next(train(model, store, config, TrainState(model, config)))
    assert isinstance(step, StepReport)
    assert step.loss == pytest.approx(nats / n, rel=1e-5)


def test_bits_per_byte_are_the_completions_own(family):
    model = make_model(family)
    store = store_of(ROWS, 48)
    (batch,) = store.held_out_windows(100)
    nats, n = alone(model, batch)
    loss, bits, _ = evaluate(LossModule(model), store)
    assert n == 10  # six bytes and four ends
    assert loss == pytest.approx(nats / n, rel=1e-5)
    assert bits == pytest.approx(nats / np.log(2) / 6, rel=1e-5)


def test_a_batch_in_which_nothing_is_scored_teaches_nothing():
    model = make_model("qwen3", context_length=12)
    before = model.to_arrays()
    store = store_of([(b"ab" * 40, b"c")], 12)
    unscored = next(step for step in range(9) if not store.batch(step).scored.any())
    config = TrainConfig(steps=unscored + 1, batch_size=2, weight_decay=0.0, eval_every=99)
    state = TrainState(model, config)
    state.progress.step = unscored
    step = next(train(model, store, config, state))
    assert step.loss == 0
    assert all(np.array_equal(before[name], after) for name, after in model.to_arrays().items())


def request(folder, name="model", **overrides: str) -> runs.RunRequest:
    return runs.RunRequest(
        corpus=[str(folder / "rows.jsonl")],
        out=folder / name,
        family="classic",  # untrained, its attention is already heard
        size="tiny",
        train=TrainConfig(steps=4, batch_size=2, val_fraction=0.25, eval_every=2),
        overrides={"d_model": "16", "n_layers": "1", "context_length": "48", "dropout": "0"}
        | overrides,
        threads=1,
    )


@pytest.fixture
def rows(tmp_path):
    pairs = [{"prompt": f"after {i} comes ", "completion": str(i + 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


def test_a_run_on_rows_resumes_exactly(rows):
    whole = list(runs.start(request(rows, "whole")))
    pauses = iter([False, False, True])
    list(runs.start(request(rows, "paused"), stopped=lambda: next(pauses)))
    resumed = list(resume(rows / "paused", threads=1))
    assert [r.bits_per_byte for r in resumed if isinstance(r, EvalReport)][-1] == [
        r.bits_per_byte for r in whole if isinstance(r, EvalReport)
    ][-1]
    weights = [rows / name / "model.safetensors" for name in ("whole", "paused")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def first_loss(request: runs.RunRequest) -> float:
    return next(r.loss for r in runs.start(request) if isinstance(r, StepReport))


def test_what_is_scored_is_kept_with_the_run_and_is_the_users_choice(rows):
    losses = [first_loss(request(rows, name, loss_on=name)) for name in ("completion", "all")]
    assert losses[0] != losses[1]
    run, tokens = run_state.load_run(rows / "completion")
    assert set(tokens) == {"train", "held_out", "train_scored", "held_out_scored"}
    assert run["held_out_bytes"] == 10 * 2  # of the answers 31 to 40
    store = TokenDataset(
        **tokens, end_of_text=END, held_out_bytes=20, context_length=48, batch_size=2, seed=1337
    )
    config = ModelConfig(**run["plan"]["model"])
    untrained = new_state(config, TrainConfig(**run["plan"]["train"]), torch.device("cpu")).model
    nats, n = alone(untrained, store.batch(0))
    assert losses[0] == pytest.approx(nats / n, rel=1e-5)
    run, tokens = run_state.load_run(rows / "all")
    assert set(tokens) == {"train", "held_out"}
    assert run["held_out_bytes"] == 10 * len("after 30 comes 31")


def test_rows_without_any_completion_are_refused(tmp_path):
    lines = [json.dumps({"prompt": f"abc{i}", "completion": ""}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    asked = runs.RunRequest(corpus=[str(tmp_path / "rows.jsonl")], out=tmp_path / "model")
    with pytest.raises(CorpusError, match="no row has a completion"):
        runs.dry_run(asked)
