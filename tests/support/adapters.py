"""Small random LoRA adapters."""

from pathlib import Path

import numpy as np

from tgen.checkpoint import model_dir
from tgen.lora import adapter_base, model_with_adapter
from tgen.lora.matrices import Pair, adapter_layout


def save_adapter(path: Path, base: Path, *, template: str | None = None) -> Path:
    """Save an adapter of rank 2 that changes every matrix, with a chat template of its own."""
    bundle = model_dir.load(base)
    parts = {part.pair: part for row in adapter_layout(bundle.config).values() for part in row}
    random = np.random.default_rng(0)
    pairs = {
        name: Pair(
            random.normal(size=(2, part.n_inputs)).astype(np.float32),
            random.normal(size=(part.pair_rows, 2), scale=0.1).astype(np.float32),
            1.0,
        )
        for name, part in parts.items()
    }
    inherited = model_dir.inherited_settings(bundle)
    model_with_adapter.save(
        path,
        bundle.config,
        bundle.tokenizer,
        pairs,
        base=str(base),
        base_digest=adapter_base.base_digest(bundle.arrays),
        alpha=2,
        inherited=inherited if template is None else inherited.with_template(template),
    )
    return path
