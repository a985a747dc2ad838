"""The steps of a run on random tokens are those of training."""

import itertools

import torch
import torch.nn.functional as F

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.model.transformer import Transformer
from tgen.reports.training import StepReport
from tgen.training.loop import train
from tgen.training.machine_speed import RandomRun, random_dataset
from tgen.training.state import new_state

SHAPE = dict(vocab_size=40, n_layers=2, d_model=16, n_heads=2, context_length=8)
CPU = torch.device("cpu")


def test_steps_equal_those_of_the_training_loop():
    model = ModelConfig.of("qwen3", **SHAPE)
    config = ResolvedTrainConfig(batch_size=3, dropout=0.1, seed=5)
    run = RandomRun(model, config, CPU)
    assert [run.advance(2), run.advance(3)] == [2, 3]

    long = ResolvedTrainConfig(batch_size=3, dropout=0.1, seed=5, steps=100, eval_every=100)
    state = new_state(model, long, CPU)
    reports = train(state.model, random_dataset(model, long), long, state)
    steps = [r for r in itertools.islice(reports, 5) if isinstance(r, StepReport)]
    assert steps[-1].step == run.state.progress.step == 5
    for ours, theirs in zip(run.state.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_equal_the_definition():
    """AdamW on the mean next-token cross-entropy, with gradient clipping and warmup."""
    model = ModelConfig.of("gpt2", **SHAPE)
    config = ResolvedTrainConfig(batch_size=3, optimizer="adamw", weight_decay=0.0, warmup_steps=4)
    run = RandomRun(model, config, CPU)
    run.advance(3)

    torch.manual_seed(config.seed)
    ours = Transformer(model)
    adamw = torch.optim.AdamW(ours.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    dataset = random_dataset(model, config)
    for step in range(3):
        adamw.param_groups[0]["lr"] = config.learning_rate * (step + 1) / 5
        tokens = torch.from_numpy(dataset.batch(step).tokens)
        assert tokens.shape == (3, 9)
        F.cross_entropy(ours(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), config.grad_clip)
        adamw.step()
        adamw.zero_grad()
    for (name, a), b in zip(run.state.model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=name)


def test_random_tokens_cover_the_vocabulary():
    for size in (40, 70_000):
        text = random_dataset(
            ModelConfig.of("qwen3", **SHAPE | {"vocab_size": size}), ResolvedTrainConfig()
        )
        assert text.train.ids.min() == 0
        assert text.train.ids.max() == size - 1
