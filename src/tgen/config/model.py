"""Model architecture: families, sizes and the configuration they imply."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from tgen.config.option import require
from tgen.errors import UsageError

Position = Literal["sinusoidal", "learned", "rotary"]
Norm = Literal["layer_norm", "rms_norm"]
Activation = Literal["relu", "gelu_tanh", "gelu", "swiglu"]
Family = Literal["classic", "gpt2", "llama", "qwen3"]  # can be trained; all FAMILIES can be run
Size = Literal["nano", "micro", "tiny", "small", "medium", "large"]
DEFAULT_FAMILY: Family = "qwen3"
_MAX_D_MODEL = 1 << 20
_MAX_SINUSOIDAL = 1 << 20  # context length
_DIMENSIONS = ("vocab_size", "context_length", "n_layers", "d_model", "n_heads", "n_kv_heads",
               "head_dim", "d_ff")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling to a context longer than the one trained on.

    `linear` divides all frequencies by the factor; `llama3` leaves short wavelengths unscaled.
    """

    kind: Literal["llama3", "linear"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _require_rope_number(name, getattr(self, name))
        low, high = self.low_freq_factor, self.high_freq_factor
        require(low < high, "low_freq_factor", low, f"a number below {high}")
        n = self.original_context_length
        require(n >= 1, "original_context_length", n, "a number of at least 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder-only transformer; `ModelConfig.of` fills in a family's defaults."""

    family: str
    vocab_size: int
    context_length: int
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    position: Position
    norm: Norm
    post_norm: bool
    activation: Activation
    attention_bias: bool  # on the query, key and value projections
    output_bias: bool  # on the attention's output projection
    feed_forward_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # keys visible to a query, its own included

    def __post_init__(self) -> None:
        for name in _DIMENSIONS:
            require(getattr(self, name) >= 1, name, getattr(self, name), "a number of at least 1")
        divisor = f"a divisor of n_heads={self.n_heads}"
        require(self.n_heads % self.n_kv_heads == 0, "n_kv_heads", self.n_kv_heads, divisor)
        window = self.sliding_window
        require(window is None or window >= 1, "sliding_window", window, "a number of at least 1")
        require(0 < self.norm_eps < 1, "norm_eps", self.norm_eps, "a number between 0 and 1")
        _require_rope_number("rope_theta", self.rope_theta)
        if self.position == "rotary":
            require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        if self.position == "sinusoidal":
            require(self.d_model % 2 == 0, "d_model", self.d_model, "an even number")
            n = self.context_length  # a file stores the table of all positions
            require(n <= _MAX_SINUSOIDAL, "context_length", n, f"at most {_MAX_SINUSOIDAL:,}")
        self._check_family()

    def _check_family(self) -> None:
        """Reject values that the family's layout on disk cannot express."""
        require(self.family in FAMILIES, "family", self.family, f"one of {', '.join(FAMILIES)}")
        for name, value in FAMILIES[self.family].items():
            if name not in _FREE[self.family]:
                wanted = f"{value} in the {self.family} family"
                require(getattr(self, name) == value, name, getattr(self, name), wanted)
        if self.family in ("classic", "gpt2"):
            require(self.activation != "swiglu", "activation", "swiglu", "an ungated activation")
            heads_fill_model = self.n_heads * self.head_dim == self.d_model
            require(heads_fill_model, "head_dim", self.head_dim, "d_model / n_heads")
            heads = f"n_heads={self.n_heads} in the {self.family} family"
            require(self.n_kv_heads == self.n_heads, "n_kv_heads", self.n_kv_heads, heads)
        elif self.family != "qwen2":
            same = f"attention_bias={self.attention_bias} in the {self.family} family"
            require(self.output_bias == self.attention_bias, "output_bias", self.output_bias, same)
        if self.family != "mistral":
            none = f"None in the {self.family} family"
            require(self.sliding_window is None, "sliding_window", self.sliding_window, none)
        if self.family == "classic":
            supported = self.position in ("sinusoidal", "learned")
            require(supported, "position", self.position, "sinusoidal or learned")
            require(self.d_ff == 4 * self.d_model, "d_ff", self.d_ff, "4 * d_model")
            require(self.activation != "gelu", "activation", "gelu", "relu or gelu_tanh")

    @classmethod
    def of(cls, family: str, **values: Any) -> Self:
        """Return a family's configuration: `values` override its defaults, derived sizes are added.

        Raises UsageError for an unknown family or field and for contradictory values.
        """
        if family not in FAMILIES:
            raise UsageError(f"unknown family {family!r}", f"choose one of {', '.join(FAMILIES)}")
        names = {field.name for field in fields(cls)}
        if unknown := values.keys() - names:
            raise UsageError(
                f"unknown model field {min(unknown)!r}", f"choose one of {', '.join(sorted(names))}"
            )
        merged = SIZES["small"] | FAMILIES[family] | values
        d_model, n_heads = merged["d_model"], merged["n_heads"]
        expected = f"a number from 1 to {_MAX_D_MODEL:,}"
        require(1 <= d_model <= _MAX_D_MODEL, "d_model", d_model, expected)
        require(n_heads >= 1, "n_heads", n_heads, "a number of at least 1")
        if "head_dim" not in values:
            even = merged["position"] == "rotary"
            if d_model % (n_heads * (1 + even)):
                heads = f"n_heads={n_heads} heads{' of an even size' * even}"
                raise UsageError(
                    f"d_model={d_model} does not divide into {heads}",
                    f"set d_model to a multiple of {n_heads * (1 + even)}, or change n_heads",
                )
            merged["head_dim"] = d_model // n_heads
        if "n_kv_heads" not in values:
            merged["n_kv_heads"] = n_heads
        if "d_ff" not in values:  # three matrices of 8/3 d have as many parameters as two of 4 d
            gated = merged["activation"] == "swiglu"
            merged["d_ff"] = 32 * math.ceil(d_model * 8 / 3 / 32) if gated else 4 * d_model
        return cls(family=family, **merged)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the configuration that `dataclasses.asdict` turned into `values`."""
        scaling = values["rope_scaling"]
        return cls(**values | {"rope_scaling": scaling and RopeScaling(**scaling)})

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in float32, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * 4


def _require_rope_number(name: str, value: float) -> None:
    """Raise UsageError for a value that makes rotation angles overflow float32."""
    require(1e-6 <= value <= 1e30, name, value, "a number from 1e-6 to 1e30")


_LAYER_NORM = dict(norm="layer_norm", post_norm=False, attention_bias=True, output_bias=True,
                   feed_forward_bias=True, qk_norm=False, tied_embeddings=True,
                   norm_eps=1e-5)  # fmt: skip
_ROTARY = dict(position="rotary", norm="rms_norm", post_norm=False, activation="swiglu",
               attention_bias=False, output_bias=False, feed_forward_bias=False, qk_norm=False,
               tied_embeddings=True, norm_eps=1e-6)  # fmt: skip
# Defaults of each family: the table in docs/architecture.md.
FAMILIES: dict[str, dict[str, Any]] = {
    "classic": _LAYER_NORM | dict(position="sinusoidal", post_norm=True, activation="relu"),
    "gpt2": _LAYER_NORM | dict(position="learned", activation="gelu_tanh"),
    "llama": _ROTARY,
    "mistral": _ROTARY | dict(tied_embeddings=False, norm_eps=1e-5),
    "qwen2": _ROTARY | dict(attention_bias=True),
    "qwen3": _ROTARY | dict(qk_norm=True),
}

# Fields that may differ from the family's defaults.
_FREE = {
    "classic": {"position", "activation", "tied_embeddings", "norm_eps"},
    "gpt2": {"activation", "tied_embeddings", "norm_eps"},
    "llama": {"attention_bias", "output_bias", "feed_forward_bias", "tied_embeddings", "norm_eps"},
    "mistral": {"tied_embeddings", "norm_eps"},
    "qwen2": {"tied_embeddings", "norm_eps"},
    "qwen3": {"attention_bias", "output_bias", "tied_embeddings", "norm_eps"},
}

# The sizes of --size; the family determines the rest of the architecture.
SIZES: dict[str, dict[str, int]] = {
    "nano": dict(n_layers=2, d_model=64, n_heads=2, context_length=128),
    "micro": dict(n_layers=3, d_model=96, n_heads=3, context_length=128),
    "tiny": dict(n_layers=4, d_model=128, n_heads=4, context_length=128),
    "small": dict(n_layers=5, d_model=192, n_heads=6, context_length=256),
    "medium": dict(n_layers=6, d_model=384, n_heads=6, context_length=256),
    "large": dict(n_layers=12, d_model=768, n_heads=12, context_length=1024),
}
