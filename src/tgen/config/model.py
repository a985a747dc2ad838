"""Model architecture: families and the configuration they imply."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from tgen.config.option import require
from tgen.config.sizes import SIZES
from tgen.errors import UsageError

Position = Literal["sinusoidal", "learned", "rotary"]
Norm = Literal["layer_norm", "rms_norm"]
# Norms of a block: before each sublayer; after each residual addition; before, with both
# sublayers reading the block's input, by two norms or by one that they share; the output of each
# sublayer; before it and its output.
NormPlacement = Literal["pre", "post", "parallel", "shared", "output", "sandwich"]
NormParameters = Literal["all", "weight", "none"]
Activation = Literal["relu", "relu2", "gelu_tanh", "gelu", "swiglu", "geglu"]
Rope = Literal["global", "local"]  # by rope_theta, or by local_rope_theta
GATED: tuple[Activation, ...] = ("swiglu", "geglu")  # with a third matrix
Family = Literal["classic", "gpt2", "llama", "qwen3"]  # can be trained; all FAMILIES can be run
DEFAULT_FAMILY: Family = "qwen3"
_MAX_D_MODEL = 1 << 20
_MAX_SINUSOIDAL = 1 << 20  # context length
_DIMENSIONS = ("vocab_size", "context_length", "n_layers", "d_model", "n_heads", "n_kv_heads",
               "head_dim", "d_ff")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling to a context longer than the one trained on.

    `linear` divides all frequencies by the factor; `llama3` leaves short wavelengths unscaled;
    `yarn` does so with another transition, and multiplies cosines and sines by `attention_factor`.
    `dynamic` scales only texts longer than the context length, which no engine accepts. `longrope`
    divides each frequency by its own factor: `short_factor` up to the original context length,
    which is the context length here, since `long_factor` would change the keys of earlier tokens.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic", "longrope"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the borders of the transition to whole dimensions
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_growth: float = 0.0  # of queries beyond the original context length, which is the limit

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                     "attention_factor"):  # fmt: skip
            _require_factor(name, getattr(self, name))
        for name in ("short_factor", "long_factor"):
            for factor in getattr(self, name):
                _require_factor(name, factor)
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
    norm_placement: NormPlacement
    norm_adds_one: bool = False  # a norm multiplies by 1 + weight
    norm_parameters: NormParameters = "all"  # that a norm of this kind can have
    activation: Activation
    attention_bias: bool  # on the query, key and value projections
    output_bias: bool  # on the attention's output projection
    feed_forward_bias: bool
    qk_norm: bool
    qk_norm_over_heads: bool = False  # over all heads together instead of each
    qk_norm_after_rope: bool = False
    tied_embeddings: bool
    head_bias: bool = False  # added to the logits
    norm_eps: float
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # of layers with a sliding window, then without scaling
    rotary_dim: int | None = None  # the first dimensions of a head are rotated; None: all
    rope_layers: tuple[bool, ...] | None = None  # whether each layer rotates; None: all
    sliding_window: int | None = None  # keys visible to a query, its own included
    sliding_layers: tuple[bool, ...] | None = None  # whether each has the window; None: all
    attention_scale: float | None = None  # of q k; None: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of each sublayer's output
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name in _DIMENSIONS:
            require(getattr(self, name) >= 1, name, getattr(self, name), "a number of at least 1")
        divisor = f"a divisor of n_heads={self.n_heads}"
        require(self.n_heads % self.n_kv_heads == 0, "n_kv_heads", self.n_kv_heads, divisor)
        window = self.sliding_window
        require(window is None or window >= 1, "sliding_window", window, "a number of at least 1")
        require(0 < self.norm_eps < 1, "norm_eps", self.norm_eps, "a number between 0 and 1")
        _require_factor("rope_theta", self.rope_theta)
        for name in ("attention_scale", "embedding_scale", "residual_scale", "logits_divisor"):
            if (value := getattr(self, name)) is not None:
                _require_factor(name, value)
        if self.position == "rotary":
            even = f"an even number up to head_dim={self.head_dim}"
            require(
                0 < self.n_rotated <= self.head_dim and self.n_rotated % 2 == 0,
                "head_dim" if self.rotary_dim is None else "rotary_dim",
                self.n_rotated,
                even if self.rotary_dim is not None else "an even number",
            )
            if self.rope_scaling and self.rope_scaling.kind == "yarn":
                above = "a number above 1"
                require(self.rope_theta > 1, "rope_theta", self.rope_theta, above)
            if self.local_rope_theta is not None:
                _require_factor("local_rope_theta", self.local_rope_theta)
            for name in ("short_factor", "long_factor"):
                n = len(getattr(self.rope_scaling, name, ()))
                fits = n in (0, self.n_rotated // 2)
                require(fits, name, f"{n} numbers", f"{self.n_rotated // 2} numbers")
        for name in ("rope_layers", "sliding_layers"):
            n = len(getattr(self, name) or ())
            require(n in (0, self.n_layers), name, f"{n} values", f"{self.n_layers} values")
        if self.position == "sinusoidal":
            require(self.d_model % 2 == 0, "d_model", self.d_model, "an even number")
            n = self.context_length  # a file stores the table of all positions
            require(n <= _MAX_SINUSOIDAL, "context_length", n, f"at most {_MAX_SINUSOIDAL:,}")
        self._check_family()

    def _check_family(self) -> None:
        """Reject values that the family's layout on disk cannot express."""
        require(self.family in FAMILIES, "family", self.family, f"one of {', '.join(FAMILIES)}")
        family, free = FAMILIES[self.family], _FREE[self.family]
        for field in fields(self)[1:]:
            if field.name not in (*_DIMENSIONS, *free):
                value = family.get(field.name, field.default)
                wanted = f"{value} in the {self.family} family"
                own, name = getattr(self, field.name), field.name
                if value is None and own is not None:
                    hint = f"remove it: the {self.family} family has none"
                    raise UsageError(f"{name}: invalid value {own!s:.60}", hint, field=name)
                require(own == value, name, own, wanted)
        if "activation" in free:
            ungated = "an ungated activation"
            require(self.activation not in GATED, "activation", self.activation, ungated)
        if self.family in _HEADS_FILL_MODEL:
            fills = self.n_heads * self.head_dim == self.d_model
            require(fills, "head_dim", self.head_dim, "d_model / n_heads")
        if self.family in _NO_KV_HEADS:
            heads = f"n_heads={self.n_heads} in the {self.family} family"
            require(self.n_kv_heads == self.n_heads, "n_kv_heads", self.n_kv_heads, heads)
        if self.family in _ONE_BIAS_KEY:
            same = f"{self.attention_bias}, as attention_bias, in the {self.family} family"
            require(self.output_bias == self.attention_bias, "output_bias", self.output_bias, same)
        if self.family == "classic":
            supported = self.position in ("sinusoidal", "learned")
            require(supported, "position", self.position, "sinusoidal or learned")
            require(self.d_ff == 4 * self.d_model, "d_ff", self.d_ff, "4 * d_model")
            supported = self.activation in ("relu", "gelu_tanh")
            require(supported, "activation", self.activation, "relu or gelu_tanh")
        if "norm_placement" in free:
            other = "parallel" if self.family == "gpt_neox" else "shared"
            require(self.norm_placement in ("pre", other), "norm_placement", self.norm_placement,
                    f"pre or {other}")  # fmt: skip
        if self.family == "gpt_bigcode":
            one_or_all = f"1 or n_heads={self.n_heads} in the {self.family} family"
            require(self.n_kv_heads in (1, self.n_heads), "n_kv_heads", self.n_kv_heads, one_or_all)
        if self.family == "ministral3":
            kind = self.rope_scaling.kind if self.rope_scaling else None
            require(kind == "yarn", "rope_scaling", kind, "yarn in the ministral3 family")
            assert self.rope_scaling is not None
            n = self.rope_scaling.original_context_length
            require(self.context_length <= n, "context_length", self.context_length, f"at most {n}")
        if self.family in _ROPE_WITHIN_WINDOW:
            layers = range(self.n_layers)
            rotated = [self.rope(layer) is not None for layer in layers]
            every = self.family == "exaone4" and self.sliding_window is None and all(rotated)
            within = rotated == [self.window(layer) is not None for layer in layers]
            require(every or within, "rope_layers", self.rope_layers, "sliding_layers")
        if self.family == "phi3" and self.rope_scaling:
            kind = self.rope_scaling.kind
            require(kind == "longrope", "rope_scaling", kind, "longrope in the phi3 family")
        if self.family in SCALED_EMBEDDINGS:
            scale = math.sqrt(self.d_model)
            require(self.embedding_scale == scale, "embedding_scale", self.embedding_scale,
                    f"{scale}, the square root of d_model")  # fmt: skip

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
        if family in _ONE_BIAS_KEY and "output_bias" not in values:
            merged["output_bias"] = merged["attention_bias"]
        if "n_kv_heads" not in values:
            merged["n_kv_heads"] = n_heads
        if family in SCALED_EMBEDDINGS and "embedding_scale" not in values:
            merged["embedding_scale"] = math.sqrt(d_model)
        if family in _ROPE_WITHIN_WINDOW and "rope_layers" not in values:
            if merged.get("sliding_window") is not None:
                merged["rope_layers"] = merged.get("sliding_layers")
            elif family == "cohere2":
                merged["rope_layers"] = (False,) * merged["n_layers"]
        if "d_ff" not in values:  # three matrices of 8/3 d have as many parameters as two of 4 d
            gated = merged["activation"] in GATED
            merged["d_ff"] = 32 * math.ceil(d_model * 8 / 3 / 32) if gated else 4 * d_model
        return cls(family=family, **merged)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the configuration that `dataclasses.asdict` turned into `values`."""
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        if scaling := values["rope_scaling"]:
            scaling = {n: tuple(v) if isinstance(v, list) else v for n, v in scaling.items()}
            values["rope_scaling"] = RopeScaling(**scaling)
        return cls(**values)

    @property
    def post_norm(self) -> bool:
        """Whether a norm follows each residual addition (post-norm), without a final norm."""
        return self.norm_placement == "post"

    @property
    def scales_logits(self) -> bool:
        """Whether there is a weight of the final norm, in which the logits are linear."""
        return not self.post_norm and self.norm_parameters != "none"

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate, a third matrix."""
        return self.activation in GATED

    @property
    def n_rotated(self) -> int:
        """The number of a head's dimensions that RoPE rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        """The factor of the product of query and key."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """The keys visible to a query of a layer, its own included; None: all."""
        sliding = self.sliding_layers is None or self.sliding_layers[layer]
        return self.sliding_window if sliding else None

    def rope(self, layer: int) -> Rope | None:
        """Return the rotation of a layer, None if it has none."""
        if self.position != "rotary" or (self.rope_layers and not self.rope_layers[layer]):
            return None
        local = self.local_rope_theta is not None and self.window(layer) is not None
        return "local" if local else "global"

    def cache_bytes_per_token(self, dtype: str = "float32") -> int:
        """Bytes of one token's keys and values, over all layers; in int8, each vector has a float32
        scale."""
        n_bytes = {"float32": 4, "int8": 1}.get(dtype, 2) * self.head_dim
        return 2 * self.n_layers * self.n_kv_heads * (n_bytes + 4 * (dtype == "int8"))


def _require_factor(name: str, value: float) -> None:
    """Raise UsageError for a factor that overflows or underflows float32."""
    require(1e-6 <= value <= 1e30, name, value, "a number from 1e-6 to 1e30")


_LAYER_NORM = dict(norm="layer_norm", norm_placement="pre", attention_bias=True,
                   output_bias=True, feed_forward_bias=True, qk_norm=False, tied_embeddings=True,
                   norm_eps=1e-5)  # fmt: skip
_LEARNED = _LAYER_NORM | dict(position="learned", activation="gelu_tanh")
_ROTARY = dict(position="rotary", norm="rms_norm", norm_placement="pre", activation="swiglu",
               attention_bias=False, output_bias=False, feed_forward_bias=False, qk_norm=False,
               tied_embeddings=True, norm_eps=1e-6)  # fmt: skip
_UNTIED = _ROTARY | dict(tied_embeddings=False)
_OLMO = _UNTIED | dict(norm_placement="output", qk_norm=True, qk_norm_over_heads=True)
_SHARED = dict(position="rotary", norm_placement="shared", activation="gelu_tanh", head_bias=True,
               tied_embeddings=False)  # fmt: skip
_COHERE = dict(norm="layer_norm", norm_parameters="weight", norm_placement="shared",
               norm_eps=1e-5)  # fmt: skip
_YARN = RopeScaling(kind="yarn", factor=16.0, original_context_length=16_384, query_growth=0.1)
# Defaults of each family: the table in docs/architecture.md.
FAMILIES: dict[str, dict[str, Any]] = {
    "classic": _LAYER_NORM | dict(position="sinusoidal", norm_placement="post", activation="relu"),
    "gpt2": _LEARNED,
    "gpt_neo": _LEARNED | dict(attention_bias=False, attention_scale=1.0),
    "gpt_neox": _LAYER_NORM
    | dict(position="rotary", norm_placement="parallel", activation="gelu", tied_embeddings=False),
    "llama": _ROTARY,
    "mistral": _UNTIED | dict(norm_eps=1e-5),
    "qwen2": _ROTARY | dict(attention_bias=True),
    "qwen3": _ROTARY | dict(qk_norm=True),
    "phi3": _UNTIED | dict(norm_eps=1e-5),
    "gemma3": _ROTARY
    | dict(norm_placement="sandwich", norm_adds_one=True, activation="geglu", qk_norm=True),
    "olmo2": _OLMO,
    "smollm3": _ROTARY,
    "granite": _UNTIED,
    "starcoder2": _LAYER_NORM | dict(position="rotary", activation="gelu_tanh"),
    "gemma": _ROTARY | dict(norm_adds_one=True, activation="geglu"),
    "olmo": _UNTIED | dict(norm="layer_norm", norm_parameters="none", norm_eps=1e-5),
    "olmo3": _OLMO | dict(rope_theta=500_000.0, local_rope_theta=500_000.0),
    "phi": _LAYER_NORM | _SHARED,
    "gptj": _LAYER_NORM | _SHARED | dict(attention_bias=False, output_bias=False),
    "opt": _LEARNED | dict(activation="relu"),
    "gpt_bigcode": _LEARNED,
    "stablelm": _UNTIED | dict(norm="layer_norm", norm_eps=1e-5),
    "cohere": _ROTARY | _COHERE,
    "cohere2": _ROTARY | _COHERE,
    "glm4": _UNTIED | dict(norm_placement="sandwich", attention_bias=True),
    "ministral3": _UNTIED | dict(norm_eps=1e-5, rope_scaling=_YARN),
    "arcee": _UNTIED | dict(activation="relu2", norm_eps=1e-5),
    "seed_oss": _UNTIED | dict(attention_bias=True),
    "hunyuan": _ROTARY | dict(qk_norm=True, qk_norm_after_rope=True, norm_eps=1e-5),
    "exaone4": _UNTIED | dict(norm_placement="output", qk_norm=True, norm_eps=1e-5),
}

# Fields that may differ from the family's defaults.
_ANY_NORM = {"tied_embeddings", "norm_eps"}
_ANY_ROPE = _ANY_NORM | {"rope_theta", "rope_scaling"}
_SAME_BIAS = {"attention_bias", "output_bias"}  # one key for both, but in seed_oss
_ANY_BIAS = _ANY_ROPE | _SAME_BIAS | {"feed_forward_bias"}
_WINDOWS = {"sliding_window", "sliding_layers"}
_FREE = {
    "classic": _ANY_NORM | {"position", "activation"},
    "gpt2": _ANY_NORM | {"activation"},
    "gpt_neo": _ANY_NORM | _WINDOWS | {"activation"},
    "gpt_neox": _ANY_ROPE | _SAME_BIAS | {"activation", "norm_placement", "rotary_dim"},
    "llama": _ANY_BIAS,
    "mistral": _ANY_ROPE | {"sliding_window"},
    "qwen2": _ANY_ROPE,
    "qwen3": _ANY_ROPE | _SAME_BIAS,
    "phi3": _ANY_ROPE | {"rotary_dim", "sliding_window"},
    "gemma3": _ANY_ROPE
    | _SAME_BIAS
    | _WINDOWS
    | {"local_rope_theta", "attention_scale", "embedding_scale"},
    "olmo2": _ANY_ROPE | _SAME_BIAS,
    "smollm3": _ANY_BIAS | {"rope_layers"},
    "granite": _ANY_BIAS
    | {"attention_scale", "embedding_scale", "residual_scale", "logits_divisor"},
    "starcoder2": _ANY_ROPE | {"activation", "sliding_window"},
    "gemma": _ANY_ROPE | _SAME_BIAS | {"embedding_scale"},
    "olmo": (_ANY_ROPE | _SAME_BIAS) - {"norm_eps"},
    "olmo3": _ANY_ROPE | _SAME_BIAS | _WINDOWS | {"local_rope_theta"},
    "phi": _ANY_ROPE | {"activation", "rotary_dim"},
    "gptj": _ANY_NORM | {"activation", "rotary_dim"},
    "opt": {"tied_embeddings", "activation"},
    "gpt_bigcode": _ANY_NORM | {"activation"},
    "stablelm": _ANY_ROPE | {"attention_bias", "norm_placement", "rotary_dim"},
    "cohere": _ANY_ROPE | _SAME_BIAS | {"logits_divisor"},
    "cohere2": _ANY_ROPE | _SAME_BIAS | _WINDOWS | {"logits_divisor", "rope_layers"},
    "glm4": _ANY_ROPE | {"attention_bias", "rotary_dim"},
    "ministral3": _ANY_ROPE | {"sliding_window"},
    "arcee": _ANY_BIAS,
    "seed_oss": _ANY_BIAS,
    "hunyuan": _ANY_ROPE | _SAME_BIAS,
    "exaone4": _ANY_ROPE | _WINDOWS | {"rope_layers"},
}
_ONE_BIAS_KEY = {family for family, free in _FREE.items() if free >= _SAME_BIAS} - {"seed_oss"}
_ROPE_WITHIN_WINDOW = {"cohere2", "exaone4"}  # other layers do not rotate
SCALED_EMBEDDINGS = {"gemma", "gemma3"}  # by the square root of d_model
# Families without head_dim or without n_kv_heads in their config.json.
_HEADS_FILL_MODEL = {
    "classic", "gpt2", "gpt_neo", "gpt_neox", "olmo2", "phi3", "starcoder2", "olmo", "olmo3", "phi",
    "gptj", "opt", "gpt_bigcode", "stablelm", "cohere", "cohere2",
}  # fmt: skip
_NO_KV_HEADS = {"classic", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt"}
