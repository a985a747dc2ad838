"""The sizes of new models; the family determines the rest of the architecture."""

from typing import Literal

Size = Literal["nano", "micro", "tiny", "small", "medium", "large"]

SIZES: dict[str, dict[str, int]] = {
    "nano": dict(n_layers=2, d_model=64, n_heads=2, context_length=128),
    "micro": dict(n_layers=3, d_model=96, n_heads=3, context_length=128),
    "tiny": dict(n_layers=4, d_model=128, n_heads=4, context_length=128),
    "small": dict(n_layers=5, d_model=192, n_heads=6, context_length=512),
    "medium": dict(n_layers=6, d_model=384, n_heads=6, context_length=512),
    "large": dict(n_layers=12, d_model=768, n_heads=12, context_length=1024),
}
