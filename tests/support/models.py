"""Small random models of each family, and the corpus of the tests."""

import torch

from tgen.config import FAMILIES, ModelConfig
from tgen.model.transformer import Transformer

TEXT = (
    "The king said: what is this? 'Tis naïve, 日本 🦋 and more.\n\nWhat is a crown?\n" * 40
).encode()
ALL_FAMILIES = list(FAMILIES)


def make_model(family: str, *, seed: int = 0, **values: object) -> Transformer:
    """Make a small random model whose weights are large enough for every part to matter."""
    shape = {"vocab_size": 300, "n_layers": 2, "d_model": 32, "n_heads": 4, "context_length": 48}
    if family not in ("classic", "gpt2"):
        shape["n_kv_heads"] = 2
    if family == "mistral":
        shape["sliding_window"] = 20
    config = ModelConfig.of(family, **shape | values)
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
