"""A decoder-only transformer for all model families, from top to bottom.

Tokens become vectors. Each block lets every position attend to itself and earlier positions, then
transforms each position by a feed-forward network. The final vectors give the logits of the
vocabulary. Families differ in position encoding, in type and placement of norms, in activation,
and in scale factors: see `ModelConfig`. With activation checkpointing, blocks are computed again in
the backward pass, to save memory.

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

from tgen.config import ModelConfig, Rope
from tgen.machine.memory import check_ram
from tgen.model import fused
from tgen.model.activation_checkpointing import checkpoint_block
from tgen.model.attention import (
    Mask,
    attend,
    causal_mask,
    document_mask,
    document_positions,
    document_spans,
)
from tgen.model.dropout import Dropout
from tgen.model.kv_cache import KVCache
from tgen.model.precision import linear, round_input, stored_product
from tgen.model.rope import rotary_tables, sinusoid

_FIRST_POSITIONS = 4096  # in the position tables at first: most of a long context is never used


class Recorder(Protocol):
    """A receiver of intermediate results, implemented in `tgen.inspection`."""

    def attention(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_out: Tensor
    ) -> None:
        """Record a layer's attention, after rotation: q and attn_out (B, H, T, D), k and v
        (B, n_kv_heads, S, D), mask (T, S) bool or None for plain causal attention."""


class ForwardContext(NamedTuple):
    """Inputs of a block besides the vectors."""

    rope: tuple[Tensor, Tensor] | None  # cos and sin of the positions, broadcast to (B, H, T, n/2)
    # (T, S) or (B, 1, T, S) bool, or the spans of each sequence; None: plain causal attention
    mask: Mask
    cache: KVCache | None
    recorder: Recorder | None


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich 2019), or * (1 + weight); then / divisor."""

    def __init__(
        self, size: int, eps: float, *, adds_one: bool = False, divisor: float = 1.0
    ) -> None:
        super().__init__()
        self.eps, self.adds_one, self.divisor = eps, adds_one, divisor
        self.weight = nn.Parameter(torch.zeros(size) if adds_one else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return fused.rms_norm(x.to(dtype), self.scale.to(dtype), self.eps)

    @property
    def scale(self) -> Tensor:
        """The factor of each normalized number, (size,)."""
        # In bfloat16, 1 + weight would round a small weight away.
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        scale = 1 + weight if self.adds_one else weight
        return scale if self.divisor == 1 else scale / self.divisor


class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation * weight + bias (Ba et al. 2016), then / divisor; a family may lack
    the bias, or both."""

    def __init__(self, config: ModelConfig, divisor: float) -> None:
        has = config.norm_parameters
        super().__init__(
            config.d_model, config.norm_eps, elementwise_affine=has != "none", bias=has == "all"
        )
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        weight, bias = (
            None if p is None else p.to(torch.promote_types(x.dtype, p.dtype))
            for p in (self.weight, self.bias)
        )
        out = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return out if self.divisor == 1 else out / self.divisor

    @property
    def scale(self) -> Tensor:
        """The factor of each normalized number, (size,) or ()."""
        scale = torch.ones(()) if self.weight is None else self.weight
        return scale / self.divisor


def make_norm(config: ModelConfig, *, divisor: float = 1.0) -> nn.Module:
    """Return the family's norm over C."""
    if config.norm == "rms_norm":
        adds_one = config.norm_adds_one
        return RMSNorm(config.d_model, config.norm_eps, adds_one=adds_one, divisor=divisor)
    return LayerNorm(config, divisor)


class Linear(nn.Linear):
    """A linear layer that initializes its weight from N(0, std^2)."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, std: float) -> None:
        self.std = std
        super().__init__(n_in, n_out, bias=bias)

    def reset_parameters(self) -> None:
        """Initialize the weight; the bias starts at 0."""
        if not self.weight.is_meta:  # sampling on the meta device would import torch's compiler
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the precision of products."""
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding table that is initialized from N(0, std^2)."""

    def __init__(self, n: int, size: int, *, std: float) -> None:
        self.std = std
        super().__init__(n, size)

    def reset_parameters(self) -> None:
        """Initialize the table."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)


class CausalSelfAttention(nn.Module):
    """Causal multi-head attention; with fewer key than query heads, grouped-query attention."""

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
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.norm_over_heads = config.qk_norm_over_heads
        self.norm_after_rope = config.qk_norm_after_rope
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(size, config.norm_eps, adds_one=config.norm_adds_one)
                for size in ((n_q, n_kv) if self.norm_over_heads else 2 * (config.head_dim,))
            )
        self.scale = config.attention_scale  # None: 1 / sqrt(D)
        self.dropout = dropout

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, _ = x.shape
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        if self.norm_over_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (y.view(B, T, -1, self.head_dim) for y in (q, k))
        if not self.norm_over_heads and not self.norm_after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, H, T, D), (B, n_kv_heads, T, D)
        v = v.view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        if context.rope is not None:
            q, k = fused.rotate(q, *context.rope), fused.rotate(k, *context.rope)
        if self.norm_after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)  # (B, n_kv_heads, S, D)
        mask = context.mask
        attn_out = attend(q, k, v, mask=mask, scale=self.scale)
        if context.recorder is not None:
            assert not isinstance(mask, list)
            context.recorder.attention(self.layer, q, k, v, mask, attn_out)
        out: Tensor = self.o_proj(attn_out.transpose(1, 2).reshape(B, T, self.sizes[0]))
        return self.dropout(out)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, or three with a gate (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, dropout: Dropout) -> None:
        super().__init__()
        self.activation = config.activation
        bias, std = config.feed_forward_bias, 0.02 if not config.post_norm else config.d_model**-0.5
        down_std = config.d_ff**-0.5 if config.post_norm else std / math.sqrt(2 * config.n_layers)
        if config.gated:
            self.gate_proj = Linear(config.d_model, config.d_ff, bias=bias, std=std)
        self.up_proj = Linear(config.d_model, config.d_ff, bias=bias, std=std)
        self.down_proj = Linear(config.d_ff, config.d_model, bias=bias, std=down_std)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        dtype = x.dtype
        if isinstance(self.up_proj, Linear):  # frozen layers and adapters need float32
            x = round_input(x)
        x_up = self.up_proj(x)
        if self.activation == "swiglu":
            hidden = F.silu(self.gate_proj(x)) * x_up
        elif self.activation == "geglu":
            hidden = fused.gelu_tanh(self.gate_proj(x)) * x_up
        elif self.activation == "relu":
            hidden = F.relu(x_up)
        elif self.activation == "relu2":
            hidden = F.relu(x_up).square()
        elif self.activation == "gelu_tanh":
            hidden = fused.gelu_tanh(x_up)
        else:
            hidden = F.gelu(x_up)
        return self.dropout(self.down_proj(hidden).to(dtype))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection; see `NormPlacement`."""

    def __init__(self, config: ModelConfig, layer: int, dropout: Dropout) -> None:
        super().__init__()
        self.placement, self.residual_scale = config.norm_placement, config.residual_scale
        before = self.placement != "output"
        self.normalizes_outputs = self.placement in ("output", "sandwich")
        if before:
            self.attention_norm = make_norm(config)
        self.attention = CausalSelfAttention(config, layer, dropout)
        if self.normalizes_outputs:
            self.attention_output_norm = make_norm(config)
        if before and self.placement != "shared":
            self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config, dropout)
        if self.normalizes_outputs:
            self.feed_forward_output_norm = make_norm(config)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.placement == "post":
            x = self.attention_norm(x + self.attention(x, context))
            out: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
            return out
        after_attention = x + self.attention_out(x, context)
        return after_attention + self.feed_forward_out(
            x if self.placement in ("parallel", "shared") else after_attention
        )

    def attention_out(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the attention layer's contribution to the residual stream x, (B, T, C).

        Not for post-norm blocks.
        """
        x = x if self.placement == "output" else self.attention_norm(x)
        out = self.attention(x, context)
        if self.normalizes_outputs:
            out = self.attention_output_norm(out)
        return self._scaled(out)

    def feed_forward_out(self, x: Tensor) -> Tensor:
        """Return the feed-forward layer's contribution to the residual stream, (B, T, C).

        Not for post-norm blocks.
        """
        if self.placement != "output":
            norm = self.attention_norm if self.placement == "shared" else self.feed_forward_norm
            x = norm(x)
        out = self.feed_forward(x)
        if self.normalizes_outputs:
            out = self.feed_forward_output_norm(out)
        return self._scaled(out)

    def _scaled(self, out: Tensor) -> Tensor:
        return out if self.residual_scale == 1 else out * self.residual_scale


class Transformer(nn.Module):
    """The complete model. `forward` always returns logits."""

    sinusoid: Tensor  # (n, C) of the first n positions, not trained; see `reserve_positions`
    cos: Tensor  # (n, n_rotated / 2), not trained
    sin: Tensor
    local_cos: Tensor  # the same by local_rope_theta
    local_sin: Tensor
    _n_positions: int  # in these tables

    def __init__(self, config: ModelConfig, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        # A larger embedding, so that it does not vanish beside the sinusoid's amplitude of 1.
        std = 0.02 if config.position != "sinusoidal" else 0.1
        self.token_embedding = Embedding(config.vocab_size, config.d_model, std=std)
        if config.position == "learned":
            self.position_embedding = Embedding(config.context_length, config.d_model, std=0.02)
        self.dropout = Dropout(dropout)  # shared by all blocks
        blocks = [Block(config, layer, self.dropout) for layer in range(config.n_layers)]
        self.blocks = nn.ModuleList(blocks)
        # The final norm divides the logits, since they are linear in its output.
        self.final_norm = (
            nn.Identity() if config.post_norm else make_norm(config, divisor=config.logits_divisor)
        )
        self.lm_head: nn.Module
        if not config.tied_embeddings:
            bias = config.head_bias
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=bias, std=0.02)
        elif config.head_bias:
            self.lm_head = nn.Module()
            self.lm_head.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.make_tables()

    @classmethod
    def from_arrays(cls, config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Create a float32 model with these weights; bfloat16 arrays are uint16 bits."""
        with torch.device("meta"):
            model = cls(config)
        model.make_tables()
        copied = sum(a.size for a in arrays.values() if a.nbytes != 4 * a.size)
        check_ram(4 * copied, "converting the weights to float32")
        model.load_arrays(arrays, assign=True)
        return model.eval()

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], *, assign: bool = False) -> None:
        """Load all weights; `assign` shares the memory of float32 arrays instead of copying."""
        tensors = {name: stored_tensor(array).float() for name, array in arrays.items()}
        self.load_state_dict(tensors, strict=True, assign=assign)

    def to_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return float32 copies of all weights by name."""
        return {n: t.detach().float().cpu().numpy().copy() for n, t in self.state_dict().items()}

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """(B, T) int64 -> logits (B, T, V); `inputs` as in `hidden_states`."""
        return self.logits(self.hidden_states(tokens, **inputs))

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        recorder: Recorder | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """(B, T) int64 -> final hidden states (B, T, C) after the final norm, for `logits`.

        With a cache the T tokens follow the cached ones. `documents` (B, T), only for training,
        numbers the documents of packed sequences in non-decreasing order: tokens attend to their
        own document, with positions from its start.
        """
        assert documents is None or (cache is None and recorder is None)
        config, T = self.config, tokens.shape[1]
        masks: dict[int | None, Mask] = {}  # by window
        windows = {config.window(layer) for layer in range(config.n_layers)}
        if cache is not None:
            positions = cache.extend(T)
            masks = {window: cache.mask(window) for window in windows}
        elif documents is not None:
            positions = document_positions(documents)
            for window in windows:
                spans = document_spans(documents, window)
                masks[window] = document_mask(documents, window) if spans is None else spans
        else:
            positions = torch.arange(T, device=tokens.device)
            for window in windows:
                within = window is None or window >= T
                masks[window] = None if within else causal_mask(positions, T, window)
        n = min(T if cache is None else cache.keys[0].shape[2], config.context_length)
        self.reserve_positions(n)
        # Padding of a shorter sequence may exceed the storage; its results are discarded.
        positions = positions.clamp(max=n - 1)  # (T,) or (B, T)
        x = self.token_embedding(tokens)  # (B, T, C)
        if x.dtype == torch.float16:  # sums of many layers may exceed 65504
            x = x.float()
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        ropes: dict[Rope | None, tuple[Tensor, Tensor] | None] = {None: None}
        if config.position == "rotary":
            # Insert the head axis: (1, T, n/2) or (B, 1, T, n/2).
            ropes["global"] = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
            if config.local_rope_theta is not None:
                cos, sin = self.local_cos[positions], self.local_sin[positions]
                ropes["local"] = cos.unsqueeze(-3), sin.unsqueeze(-3)
        elif config.position == "learned":
            x = x + self.position_embedding(positions)
        else:
            x = x + self.sinusoid[positions]
        x = self.dropout(x)
        for layer, block in enumerate(self.blocks):
            rope, mask = ropes[config.rope(layer)], masks[config.window(layer)]
            context = ForwardContext(rope, mask, cache, recorder)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint_block(block, x, context, self.dropout)
            else:
                x = block(x, context)
        out: Tensor = self.final_norm(x)
        return out

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, C) that maps hidden states to logits; may be the token embedding."""
        owner = self.token_embedding if self.config.tied_embeddings else self.lm_head
        assert isinstance(owner.weight, Tensor)
        return owner.weight

    @property
    def output_bias(self) -> Tensor | None:
        """The vector (V,) that is added to the logits, None in most families."""
        if not self.config.head_bias:
            return None
        assert isinstance(self.lm_head.bias, Tensor)
        return self.lm_head.bias

    def logits(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        logits = stored_product(x, self.output_weight)
        return logits if self.output_bias is None else logits + self.output_bias

    def as_product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (..., n) and a matrix (V, n) whose product is `logits(x)`. A bias is one more
        column of the matrix, beside a 1 in x."""
        weight, bias = self.output_weight, self.output_bias
        if bias is None:
            return x, weight
        column = bias[:, None].to(weight.dtype)
        return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1), torch.cat([weight, column], 1)

    def reserve_positions(self, n: int) -> None:
        """Compute the position tables of at least `n` positions, if they are shorter."""
        if n > self._n_positions:
            self._n_positions = max(n, 2 * self._n_positions)
            with torch.inference_mode(False):  # training uses them too
                for name, table in self._tables(self._n_positions).items():
                    setattr(self, name, table.to(getattr(self, name)))

    def make_tables(self) -> None:
        """Register the first rows of the position tables as buffers that are not saved."""
        self._n_positions = _FIRST_POSITIONS
        for name, table in self._tables(_FIRST_POSITIONS).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, n: int) -> dict[str, Tensor]:
        """Return the tables of the first `n` positions, or of all if there are fewer."""
        config, n = self.config, min(n, self.config.context_length)
        if config.position == "sinusoidal":
            return {"sinusoid": torch.from_numpy(sinusoid(n, config.d_model))}
        if config.position == "rotary":
            tables = dict(zip(("cos", "sin"), rotary_tables(config, n), strict=True))
            if config.local_rope_theta is not None:
                local = rotary_tables(config, n, "local")
                tables |= zip(("local_cos", "local_sin"), local, strict=True)
            return {name: torch.from_numpy(table) for name, table in tables.items()}
        return {}


def stored_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array; uint16 are bits of bfloat16."""
    tensor = torch.from_numpy(np.asarray(array))  # quantized ones are dequantized
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
