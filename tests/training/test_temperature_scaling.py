"""Temperature scaling: the factor with the lowest loss, also in the saved weights."""

import numpy as np
import pytest
import torch

from tgen.config import ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.corpus import TokenDataset, Tokens
from tgen.model.transformer import Transformer
from tgen.training.evaluation import evaluate
from tgen.training.loss import LossModule
from tgen.training.state import new_state
from tgen.training.temperature_scaling import scale_logits


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3", "granite"])
def test_logits_are_scaled_for_the_lowest_loss_in_the_saved_weights_as_well(family):
    shape = {"vocab_size": 40, "n_layers": 1, "d_model": 16, "n_heads": 2, "context_length": 8}
    config = ModelConfig.of(family, **shape)
    state = new_state(config, ResolvedTrainConfig(), torch.device("cpu"))
    text = [0]
    with torch.no_grad():
        state.model.output_weight.normal_(std=0.5 * config.logits_divisor)
        state.loss_module.eval()
        while len(text) < 500:  # sampled at temperature 2, each token in its window of 8
            window = torch.tensor([text[(len(text) - 1) // 8 * 8 :]])
            text += torch.softmax(state.model(window)[0, -1] / 2, 0).multinomial(1).tolist()
    tokens = Tokens(np.array(text, np.uint16))
    store = TokenDataset(
        train=tokens, val=tokens, val_bytes=600, context_length=8, batch_size=1, seed=0
    )
    scales, losses = [1.0], []
    for _ in range(20):
        evaluation = evaluate(state.loss_module, store, logit_scale=scales[-1])
        losses.append(evaluation.loss)
        scales.append(evaluation.best_logit_scale)
    assert scales[-1] == pytest.approx(scales[-2], abs=1e-5)
    assert scales[-1] == pytest.approx(0.5, abs=0.15)
    for near in (0.99, 1.01):
        other = evaluate(state.loss_module, store, logit_scale=scales[-1] * near)
        assert other.loss > losses[-1]
    weights = scale_logits(state.copy_weights(), config, scales[-1])
    saved = evaluate(LossModule(Transformer.from_arrays(config, weights)), store)
    assert saved.loss == pytest.approx(losses[-1], rel=1e-5)
