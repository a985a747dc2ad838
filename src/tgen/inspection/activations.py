"""Activations as arrays: the vectors between layers, and the parts of each layer."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgen.config import ModelConfig
from tgen.inspection.attention import AttentionRecorder
from tgen.inspection.hooks import iterate_logits, parts_recorded, token_batch
from tgen.model.transformer import Transformer

Activations = dict[str, NDArray[np.float32]]


def activation_bytes(
    config: ModelConfig, n_tokens: int, layers: Collection[int], parts: Collection[str]
) -> int:
    """Return the size of these parts of a text's activations in float32."""
    per_head, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    once = {"final_norm": config.d_model, "logits": config.vocab_size}
    per_layer = dict.fromkeys(("residual", "attention", "feed_forward"), config.d_model)
    per_layer |= {"heads": per_head, "queries": per_head, "keys": keys, "values": keys}
    per_layer["attention_weights"] = config.n_heads * n_tokens
    per_token = sum(once.get(part, 0) + len(layers) * per_layer.get(part, 0) for part in parts)
    return 4 * n_tokens * per_token


class _ActivationRecorder(AttentionRecorder):
    """A recorder that stores queries, keys, values and attention weights, and checks all layers."""

    def __init__(self, model: Transformer, layers: Collection[int], parts: Collection[str]) -> None:
        super().__init__(self._add_weights, scale=model.config.score_scale, layers=layers)
        self.arrays: Activations = {}
        self._selected, self._parts = layers, parts

    def store(self, name: str, x: Tensor) -> None:
        """Store one part of one text, (1, T, ...)."""
        self.arrays[name] = np.ascontiguousarray(x[0].float().cpu().numpy())

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_out: Tensor
    ) -> None:
        """Store one layer."""
        if layer in self._selected:
            for part, x in (("queries", q), ("keys", k), ("values", v)):
                if part in self._parts:
                    self.store(f"{part}.{layer}", x.transpose(1, 2))
            if "attention_weights" in self._parts:
                weights = np.zeros((q.shape[1], q.shape[2], k.shape[2]), np.float32)
                self.arrays[f"attention_weights.{layer}"] = weights
        super().attention(layer, q, k, v, mask, attn_out)

    def _add_weights(self, layer: int, first: int, weights: Tensor) -> None:
        array = self.arrays.get(f"attention_weights.{layer}")
        if array is not None:
            n, n_keys = weights.shape[-2:]
            array[:, first : first + n, :n_keys] = weights[0].cpu().numpy()


@torch.no_grad()
def record_activations(
    model: Transformer, ids: Sequence[int], layers: Collection[int], parts: Collection[str]
) -> tuple[Activations, AttentionRecorder]:
    """Return the named parts of these layers of a text, and the recorder with the errors of the
    attention weights.

    `residual.N` is the residual stream before layer N and after layer N - 1. In all families but
    post-norm ones, `attention.N` and `feed_forward.N` are what a layer adds to it. `heads.N` are
    the heads' outputs before the output projection, and queries and keys are rotated.
    """
    recorder = _ActivationRecorder(model, layers, parts)

    def store(part: str, layer: int, x: Tensor) -> None:
        adds = part in ("attention", "feed_forward")
        recorder.store(f"{part}.{layer}", x * model.config.residual_scale if adds else x)

    sites = [(part, layer) for part in ("heads", "attention", "feed_forward") for layer in layers]
    sites += [("residual", n) for n in sorted({n for i in layers for n in (i, i + 1)})]
    with parts_recorded(model, [site for site in sites if site[0] in parts], store):
        x = model.hidden_states(token_batch(model, [ids]), recorder=recorder)
    if "final_norm" in parts:  # transformers divides the logits instead
        recorder.store("final_norm", x * getattr(model.final_norm, "divisor", 1))
    if "logits" in parts:
        logits = np.empty((len(ids), model.config.vocab_size), np.float32)
        for chunk, values in iterate_logits(model, x[0]):
            logits[chunk] = values.cpu().numpy()
        recorder.arrays["logits"] = logits
    return recorder.arrays, recorder
