"""The start from a bigram model."""

import numpy as np
import torch

from tgen.config import ModelConfig
from tgen.corpus import count_bigrams
from tgen.model.transformer import Transformer
from tgen.planning.hyperparameters import can_start_from_bigrams
from tgen.training.bigram_start import kneser_ney, low_rank_tables, start_from_bigrams

N = 40


def text(n=20_000):
    """Tokens of a random Markov chain, whose rows of probabilities are uneven."""
    random = np.random.default_rng(0)
    rows = random.dirichlet(np.full(N, 0.3), N).cumsum(1)
    tokens = [0]
    for u in random.random(n):
        tokens.append(int((rows[tokens[-1]] < u).sum().clip(max=N - 1)))
    return np.array(tokens, np.uint16)


def model_config(d_model):
    shape = {"d_model": d_model, "n_layers": 2, "n_heads": 2, "context_length": 16}
    return ModelConfig.of("qwen3", **shape, vocab_size=N, tied_embeddings=False)


def started(tokens, d_model):
    torch.manual_seed(0)
    arrays = Transformer(model_config(d_model)).to_arrays()
    return Transformer.from_arrays(
        model_config(d_model), start_from_bigrams(arrays, count_bigrams(tokens, N), seed=0)
    )


def test_bigrams_are_counted_across_blocks(monkeypatch):
    monkeypatch.setattr("tgen.storage.disk_array._BLOCK", 64)
    tokens = text(500)
    counts = count_bigrams(tokens, N)
    expected = np.zeros((N, N))
    np.add.at(expected, (tokens[:-1], tokens[1:]), 1)
    assert np.array_equal(counts, expected)


def test_kneser_ney_gives_probabilities_and_leaves_none_out():
    counts = torch.from_numpy(count_bigrams(text(300), N))
    probabilities = kneser_ney(counts)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(N))
    assert (probabilities > 0).all()
    discount = (counts == 1).sum() / ((counts == 1).sum() + 2 * (counts == 2).sum())
    i, j = divmod(int(counts.argmax()), N)
    rest = discount * (counts[i] > 0).sum() / counts[i].sum()
    continuation = ((counts > 0).sum(0) + 0.5)[j] / ((counts > 0).sum(0) + 0.5).sum()
    direct = (counts[i, j] - discount) / counts[i].sum()
    torch.testing.assert_close(probabilities[i, j], direct + rest * continuation)


def test_wide_model_starts_as_the_bigram_model_and_a_narrow_one_near_it():
    tokens = text()
    held_out = torch.from_numpy(tokens[-2000:].astype(np.int64))
    wanted = kneser_ney(torch.from_numpy(count_bigrams(tokens, N)))
    best = -wanted[held_out[:-1], held_out[1:]].log().mean().item()
    losses = []
    for d_model in (64, 16, 8):
        model = started(tokens, d_model)
        with torch.no_grad():
            log_p = model(held_out[:-1].view(-1, 1)).log_softmax(-1)[:, 0]
        losses.append(-log_p.gather(1, held_out[1:, None]).mean().item())
    assert abs(losses[0] - best) < 0.01
    assert losses == sorted(losses)
    assert losses[-1] < np.log(N) - 0.3  # far better than a random start


def test_start_does_not_depend_on_the_signs_of_singular_vectors(monkeypatch):
    log_probabilities = kneser_ney(torch.from_numpy(count_bigrams(text(), N))).log_()
    shares = torch.full((N,), 1 / N)
    svd = torch.linalg.svd

    def negated_svd(*arguments, **options):
        u, values, v = svd(*arguments, **options)
        signs = torch.ones(len(values)).index_fill_(0, torch.arange(0, len(values), 2), -1)
        return u * signs, values, v * signs[:, None]

    tables = low_rank_tables(log_probabilities, shares, 16, seed=0)
    monkeypatch.setattr(torch.linalg, "svd", negated_svd)
    for ours, negated in zip(
        tables, low_rank_tables(log_probabilities, shares, 16, seed=0), strict=True
    ):
        torch.testing.assert_close(ours, negated)


def test_blocks_contribute_nothing_at_the_start():
    model = started(text(), 32)
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        together, alone = model(tokens)[0], model(tokens.view(16, 1))[:, 0]
    torch.testing.assert_close(together, alone)


def test_models_without_tables_of_their_own_start_from_random_numbers():
    assert can_start_from_bigrams(model_config(64))
    for family in ("gpt2", "classic", "gemma3", "olmo2", "gpt_neox"):
        shape = {"d_model": 64, "n_layers": 1, "n_heads": 2, "context_length": 16}
        assert not can_start_from_bigrams(ModelConfig.of(family, **shape, vocab_size=N))
