"""Scores equal transformers' and training's arithmetic, whatever the length of the text."""

import json
import math

import numpy as np
import pytest
import torch

from support.models import TEXT, make_model
from tgen.checkpoint import model_dir
from tgen.config import EngineOptions
from tgen.corpus import TokenDataset, Tokens, read
from tgen.loaded_model import LoadedModel, open_model
from tgen.reports.score import TokenScore
from tgen.scoring import score_documents
from tgen.scoring.score import DocumentScorer, score_text
from tgen.tokenizer import Tokenizer
from tgen.training.evaluation import evaluate_alone

PART = TEXT[:900]  # more tokens than several contexts


@pytest.fixture
def open_random(tokenizer, tmp_path):
    def open_family(family: str, tokenizer: Tokenizer = tokenizer, **values: object) -> LoadedModel:
        model = make_model(family, vocab_size=tokenizer.vocab_size, **values)
        model_dir.save(tmp_path / family, model.config, tokenizer, model.to_arrays())
        return open_model(tmp_path / family, EngineOptions(device="cpu", threads=1))

    return open_family


def score_by_transformers(path, text: str, stride: int) -> tuple[float, int]:
    """Return the nats and the number of tokens of a text after an end-of-text token."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    length = model.config.max_position_embeddings
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
    nats, scored = 0.0, 1
    for start in range(0, ids.shape[1] - 1, stride):
        window = ids[:, start : start + length + 1]
        with torch.no_grad():
            logits = model(window[:, :-1]).logits.double()
        n_new = start + window.shape[1] - scored
        losses = torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="none")
        nats += losses[len(losses) - n_new :].sum().item()
        scored += n_new
        if scored == ids.shape[1]:
            break
    return nats, ids.shape[1] - 1


@pytest.mark.parametrize("family", ["classic", "gpt2", "qwen3"])
def test_scores_equal_those_of_transformers(family, open_random):
    model = open_random(family)
    for stride in (48, 24, 7):  # of a context of 48
        nats, n_tokens = score_by_transformers(model.bundle.path, PART.decode(), stride)
        score = score_text(model, PART, stride=stride)
        assert score.n_tokens == n_tokens
        bits_per_byte = nats / math.log(2) / len(PART)
        assert score.bits_per_byte == pytest.approx(bits_per_byte, abs=1e-5)
        assert score.perplexity == pytest.approx(math.exp(nats / n_tokens), rel=1e-5)


def test_score_equals_the_evaluation_of_training(open_random):
    model = open_random("qwen3")
    ids = model.tokenizer.encode(PART)
    data = TokenDataset(
        train=Tokens(np.array([model.tokenizer.end_of_text], np.uint16)),
        val=Tokens(np.array(ids, np.uint16)),
        val_bytes=len(PART),
        context_length=48,
        batch_size=1,
        seed=0,
    )
    random = make_model("qwen3", vocab_size=model.tokenizer.vocab_size)
    expected = evaluate_alone(random, data)
    score = score_text(model, PART, stride=48)  # training predicts windows one after the other
    assert score.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert score.nats / score.n_tokens == pytest.approx(expected.loss, rel=1e-5)


def test_long_document_is_scored_in_pieces_as_a_whole(open_random, monkeypatch, tmp_path):
    model = open_random("llama")
    whole = list(DocumentScorer(model, (PART,)).tokens())
    (tmp_path / "long.txt").write_bytes(PART)
    monkeypatch.setattr("tgen.corpus.tokenize._PIECE", 200)
    monkeypatch.setattr("tgen.corpus.document_table._MAX_BYTES_IN_RAM", 100)
    monkeypatch.setattr("tgen.scoring.score._FEED", 11)
    (long,) = read([str(tmp_path / "long.txt")]).documents
    assert not isinstance(long[0], bytes)
    scorer = DocumentScorer(model, long, n_blocks=3)
    assert list(scorer.tokens()) == whole
    assert b"".join(token.text for token in whole) == PART
    assert [token.position for token in whole] == list(range(len(whole)))
    assert [token.context for token in whole][:60] == [*range(1, 49), *range(25, 37)]


def test_only_the_completion_of_a_prompt_is_scored(open_random, tmp_path):
    model = open_random("gpt2")
    row = {"prompt": "The king said:", "completion": " what is this?"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    *tokens, report, total = score_documents(
        [model], read([str(tmp_path / "rows.jsonl")]).documents, with_tokens=True
    )
    assert all(isinstance(one, TokenScore) for one in tokens)
    assert b"".join([token.text for token in tokens]) == row["completion"].encode()
    assert report.score == total.score
    assert report.score.n_bytes == len(row["completion"])
    assert report.score.nats == pytest.approx(-math.fsum(one.logprob for one in tokens))
    n_prompt = len(model.tokenizer.encode(row["prompt"].encode()))
    assert tokens[0].position == n_prompt
    assert tokens[0].context == n_prompt + 1


def test_without_a_token_before_the_text_the_first_token_is_not_scored(tokenizer, open_random):
    file = json.loads(tokenizer.json)
    renamed = {"<|endoftext|>": "<|other|>"}
    for token in file["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    file["model"]["vocab"] = {
        renamed.get(name, name): i for name, i in file["model"]["vocab"].items()
    }
    model = open_random("gpt2", Tokenizer(json.dumps(file)))
    ids = model.tokenizer.encode(PART)
    first = model.tokenizer.token_bytes(ids[0])
    scorer = DocumentScorer(model, (PART,))
    tokens = list(scorer.tokens())
    assert [token.id for token in tokens] == ids[1:]
    score = score_text(model, PART)
    assert score.n_bytes == len(PART) - len(first)
    assert score.n_tokens == len(ids) - 1


def test_rank_and_logprob_are_those_of_the_logits(open_random):
    model = open_random("qwen3")
    stream = [model.tokenizer.end_of_text, *model.tokenizer.encode(PART[:60])]
    logits = model.engine.clone().extend([stream[:-1]], every_position=True).astype(np.float64)
    scored = list(DocumentScorer(model, (PART[:60],)).tokens())
    for row, token in zip(logits, scored, strict=True):
        assert token.logprob == pytest.approx(row[token.id] - np.log(np.exp(row).sum()), abs=1e-6)
        assert token.rank == (row > row[token.id]).sum()
