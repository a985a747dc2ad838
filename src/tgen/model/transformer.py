"""A decoder-only transformer, whole, for every family: read it from top to bottom.

Tokens become vectors; each block lets every position look at itself and the positions before it
(attention), then thinks about what it saw (feed-forward); the last vectors score every token of
the vocabulary. Families differ in how positions enter, which norm is used and where it stands,
and the feed-forward's activation: `ModelConfig` says which.

Shapes, here and everywhere:  B batch · T queries (new positions) · S keys (cached + new) ·
C d_model · H heads · D head_dim · V vocabulary · L layers
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tgen.config import ModelConfig
from tgen.model.attention_mask import document_mask, in_order, rotate
from tgen.model.dropout import Dropout
from tgen.model.kv_cache import KVCache
from tgen.model.rope import rotary_tables, sinusoid


class Recorder(Protocol):
    """Is shown what passes through; `introspect` implements it."""

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixed: Tensor
    ) -> None:
        """q (B, H, T, D), k and v (B, n_kv_heads, S, D) after rotation; mask (T, S) bool, None: all
        up to the query; mixed (B, H, T, D)."""


class ForwardContext(NamedTuple):
    """What goes through all blocks beside the vectors."""

    rope: tuple[Tensor, Tensor] | None  # cos and sin of the positions, broadcast to (B, H, T, D/2)
    mask: Tensor | None  # (T, S) or (B, 1, T, S) bool, who sees whom; None: all up to itself
    cache: KVCache | None
    recorder: Recorder | None


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """The family's norm over C."""
    if config.norm == "rms_norm":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps)


class Linear(nn.Linear):
    """y = x W^T + b with W drawn from N(0, std^2): the class that owns a weight initialises it."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, std: float) -> None:
        self.std = std
        super().__init__(n_in, n_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the weight; the bias starts at 0."""
        if not self.weight.is_meta:  # to draw there torch would load its compiler first
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors drawn from N(0, std^2)."""

    def __init__(self, n: int, size: int, *, std: float) -> None:
        self.std = std
        super().__init__(n, size)

    def reset_parameters(self) -> None:
        """Draws the table."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)


class CausalSelfAttention(nn.Module):
    """Multi-head attention over the positions so far, queries grouped over fewer key heads."""

    def __init__(self, config: ModelConfig, layer: int, dropout: Dropout) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.sizes = [n_q, n_kv, n_kv]
        std = 0.02 if not config.post_norm else config.d_model**-0.5
        out_std = std / math.sqrt(2 * config.n_layers) if not config.post_norm else std
        self.qkv_proj = Linear(config.d_model, n_q + 2 * n_kv, bias=config.attention_bias, std=std)
        self.o_proj = Linear(n_q, config.d_model, bias=config.output_bias, std=out_std)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.dropout = dropout

    def forward(self, x: Tensor, carried: ForwardContext) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, _ = x.shape
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q = self.q_norm(q.view(B, T, self.n_heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_norm(k.view(B, T, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = v.view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        if carried.rope is not None:
            q, k = rotate(q, *carried.rope), rotate(k, *carried.rope)
        if carried.cache is not None:
            k, v = carried.cache.update(self.layer, k, v)  # (B, n_kv_heads, S, D)
        mask = carried.mask
        causal = mask is None and T > 1  # aligns the first query with the first key
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.n_heads != self.n_kv_heads
        )
        if carried.recorder is not None:
            carried.recorder.attention(self.layer, q, k, v, mask, mixed)
        out: Tensor = self.dropout(self.o_proj(mixed.transpose(1, 2).reshape(B, T, self.sizes[0])))
        return out


class FeedForward(nn.Module):
    """Two matrices with an activation between, or three where one gates the other (SwiGLU)."""

    def __init__(self, config: ModelConfig, dropout: Dropout) -> None:
        super().__init__()
        self.activation = config.activation
        bias, std = config.feed_forward_bias, 0.02 if not config.post_norm else config.d_model**-0.5
        down_std = config.d_ff**-0.5 if config.post_norm else std / math.sqrt(2 * config.n_layers)
        if self.activation == "swiglu":
            self.gate_proj = Linear(config.d_model, config.d_ff, bias=bias, std=std)
        self.up_proj = Linear(config.d_model, config.d_ff, bias=bias, std=std)
        self.down_proj = Linear(config.d_ff, config.d_model, bias=bias, std=down_std)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x_up = self.up_proj(x)
        if self.activation == "swiglu":
            hidden = F.silu(self.gate_proj(x)) * x_up
        elif self.activation == "relu":
            hidden = F.relu(x_up)
        else:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            hidden = F.gelu(x_up, approximate=approximate)
        return self.dropout(self.down_proj(hidden))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then feed-forward, each added to what came in; norms before or after."""

    def __init__(self, config: ModelConfig, layer: int, dropout: Dropout) -> None:
        super().__init__()
        self.post_norm = config.post_norm
        self.attention_norm = make_norm(config)
        self.attention = CausalSelfAttention(config, layer, dropout)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config, dropout)

    def forward(self, x: Tensor, carried: ForwardContext) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, carried))
            out: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
            return out
        x = x + self.attention(self.attention_norm(x), carried)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The whole model. `forward` returns logits, always and only."""

    sinusoid: Tensor  # (context_length, C), fixed
    cos: Tensor  # (context_length, D/2), fixed
    sin: Tensor

    def __init__(self, config: ModelConfig, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        # A sinusoid has amplitude 1; the embedding must be heard beside it.
        std = 0.02 if config.position != "sinusoidal" else 0.1
        self.token_embedding = Embedding(config.vocab_size, config.d_model, std=std)
        if config.position == "learned":
            self.position_embedding = Embedding(config.context_length, config.d_model, std=0.02)
        self.dropout = Dropout(dropout)  # the blocks' too
        blocks = [Block(config, layer, self.dropout) for layer in range(config.n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.Identity() if config.post_norm else make_norm(config)
        if not config.tied_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False, std=0.02)
        self._make_tables()

    @classmethod
    def from_arrays(cls, config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """A model with these weights, float32; bfloat16 arrays come as their uint16 bits."""
        with torch.device("meta"):
            model = cls(config)
        model._make_tables()
        model.load_arrays(arrays, assign=True)
        return model.eval()

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], *, assign: bool = False) -> None:
        """Takes over all weights; `assign`: the arrays' own memory, where they are float32."""
        tensors = {name: _tensor(array) for name, array in arrays.items()}
        self.load_state_dict(tensors, strict=True, assign=assign)

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of all weights by name."""
        return {n: t.detach().float().cpu().numpy().copy() for n, t in self.state_dict().items()}

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        recorder: Recorder | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """(B, T) int64 -> logits (B, T, V). With a cache the T tokens follow what it holds.

        `documents` (B, T), for training alone, numbers the documents of each row, never falling:
        tokens see their own document only and count positions from its start.
        """
        return self.logits(self.hidden(tokens, cache=cache, recorder=recorder, documents=documents))

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        recorder: Recorder | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """(B, T) int64 -> the last vectors (B, T, C), normed, ready for `logits`."""
        assert documents is None or (cache is None and recorder is None)
        T = tokens.shape[1]
        if cache is not None:
            positions, mask = cache.extend(T)
        elif documents is None:
            positions, mask = in_order(T, self.config.sliding_window, tokens.device)
        else:
            positions, mask = document_mask(documents, self.config.sliding_window)
        # Padding behind a shorter row may pass the context's end; its results are thrown away.
        positions = positions.clamp(max=self.config.context_length - 1)  # (T,) or (B, T)
        x = self.token_embedding(tokens)  # (B, T, C)
        rope = None
        if self.config.position == "rotary":
            # A head's axis is put before the positions: (1, T, D/2) or (B, 1, T, D/2).
            rope = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        elif self.config.position == "learned":
            x = x + self.position_embedding(positions)
        else:
            x = x + self.sinusoid[positions]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, ForwardContext(rope, mask, cache, recorder))
        out: Tensor = self.final_norm(x)
        return out

    @property
    def head(self) -> Tensor:
        """(V, C): what scores the last vectors."""
        # Tied by use, not by a second name: one tensor in memory and in the file.
        owner = self.token_embedding if self.config.tied_embeddings else self.lm_head
        return owner.weight

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        return F.linear(x, self.head)

    def _make_tables(self) -> None:
        """Fixed numbers by position, no part of the saved weights."""
        config = self.config
        if config.position == "sinusoidal":
            table = torch.from_numpy(sinusoid(config.context_length, config.d_model))
            self.register_buffer("sinusoid", table, persistent=False)
        if config.position == "rotary":
            cos, sin = rotary_tables(config)
            self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
            self.register_buffer("sin", torch.from_numpy(sin), persistent=False)


def _tensor(array: NDArray[Any]) -> Tensor:
    tensor = torch.from_numpy(array)
    if array.dtype == np.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.float()
