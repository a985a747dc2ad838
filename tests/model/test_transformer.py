"""The transformer: cached and uncached logits are equal, it is causal, and it can learn."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from support.models import make_model
from tgen.config import FAMILIES, ModelConfig, RopeScaling
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import UsageError
from tgen.machine.cpus import cpu_count
from tgen.machine.device import set_threads
from tgen.model import transformer
from tgen.model.kv_cache import KVCache
from tgen.model.rope import sinusoid
from tgen.model.transformer import Transformer
from tgen.planning.costs import block_shapes, n_parameters, outer_shapes


def make_cache(model: Transformer, n_sequences: int = 1) -> KVCache:
    weight = model.token_embedding.weight
    return KVCache(model.config, n_sequences, device=weight.device, dtype=weight.dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "splits"),
    [(torch.float32, 1e-4, [1, 7, 19]), (torch.float64, 1e-9, range(1, 20))],
    ids=["float32", "float64"],
)
def test_cached_logits_equal_uncached_ones_at_every_position_and_split(
    family, dtype, tolerance, splits
):
    model = make_model(family).to(dtype)
    tokens = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        uncached = model(tokens)
        for split in splits:
            cache = make_cache(model, 2)
            parts = [model(tokens[:, :split], cache=cache)]
            middle = split + (20 - split) // 2  # several tokens after a non-empty cache
            if middle > split:
                parts.append(model(tokens[:, split:middle], cache=cache))
            parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(middle, 20)]
            assert (torch.cat(parts, dim=1) - uncached).abs().max() <= tolerance


def test_sequences_of_different_lengths_equal_each_alone(family):
    model = make_model(family).double()
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    more = [[1, 2], [3, 4, 5, 6], [7]]
    engine = TorchEngine(model)
    engine.select([0, 0, 0])
    engine.extend(prompts)
    batched = engine.extend(more, every_position=True)
    for prompt, new in zip(prompts, more, strict=True):
        alone = TorchEngine(model)
        alone.extend([prompt])
        logits = alone.extend([new], every_position=True)
        assert abs(batched[: len(new)] - logits).max() <= 1e-6
        batched = batched[len(new) :]
    assert len(batched) == 0


def test_rewind_and_select_keep_the_remaining_tokens(family):
    model = make_model(family).double()
    engine = TorchEngine(model)
    engine.select([0, 0])
    engine.extend([[1, 2, 3, 4], [5, 6]])
    engine.select([1, 0, 0])
    engine.rewind([2, 3, 1])
    assert engine.lengths == [2, 3, 1]
    logits = engine.extend([[7], [8], [9]])
    for i, text in enumerate([[5, 6, 7], [1, 2, 3, 8], [1, 9]]):
        assert abs(logits[i] - TorchEngine(model).extend([text])[0]).max() <= 1e-6


def test_padding_beyond_the_context_changes_nothing(family):
    """A full sequence is padded beside one that gets many tokens."""
    model = make_model(family, context_length=8).double()
    engine = TorchEngine(model)
    engine.select([0, 0])
    engine.extend([[1, 2, 3, 4, 5, 6, 7], [1]])
    logits = engine.extend([[8], [2, 3, 4, 5]])
    assert abs(logits[0] - TorchEngine(model).extend([[1, 2, 3, 4, 5, 6, 7, 8]])[0]).max() <= 1e-6
    assert abs(logits[1] - TorchEngine(model).extend([[1, 2, 3, 4, 5]])[0]).max() <= 1e-6
    with pytest.raises(ValueError, match="context length 8"):
        engine.extend([[1], [1]])


def test_no_position_depends_on_later_tokens(family):
    model = make_model(family)
    tokens = torch.randint(300, (1, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = model(tokens)
        for t in range(16):
            changed = tokens.clone()
            changed[0, t] = (tokens[0, t] + 1) % 300
            after = model(changed)
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.allclose(before[:, t], after[:, t])


def test_training_memorizes_one_batch(family):
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig.of(family, vocab_size=50, n_layers=2, d_model=32, n_heads=4, context_length=16)
    )
    tokens = torch.randint(50, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.05:
            break
    assert loss.item() < 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_logits_with_a_bias_are_one_product(tied):
    """The loss is computed from it in chunks."""
    model = make_model("phi", tied_embeddings=tied)
    with torch.no_grad():
        x = model.hidden_states(torch.arange(20)[None])
        inputs, matrix = model.as_product(x)
        assert torch.allclose(inputs @ matrix.T, model.logits(x), atol=1e-5)
        assert not torch.allclose(x @ model.output_weight.T, model.logits(x), atol=1e-2)


def test_model_from_arrays_is_equal(family):
    model = make_model(family)
    again = Transformer.from_arrays(model.config, model.to_arrays())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens), again(tokens))


SCALINGS = [
    RopeScaling(factor=8.0, original_context_length=16),
    RopeScaling(kind="linear", factor=4.0),
    RopeScaling(kind="yarn", factor=4.0, original_context_length=16, attention_factor=1.2),
    RopeScaling(kind="dynamic", factor=4.0),
    RopeScaling(
        kind="longrope",
        factor=4.0,
        original_context_length=48,
        short_factor=(1.0, 1.5, 2.0, 3.0),
        long_factor=(2.0, 2.5, 3.0, 4.0),
    ),
]


@pytest.fixture(params=list(FAMILIES))
def any_family(request) -> str:
    return str(request.param)


def test_sinusoid_follows_its_formula():
    table = torch.from_numpy(sinusoid(50, 16)).double()
    for p in (0, 1, 7, 49):
        for i in range(8):
            angle = torch.tensor(p / 10_000 ** (2 * i / 16), dtype=torch.float64)
            assert abs(table[p, 2 * i] - angle.sin()) < 1e-6
            assert abs(table[p, 2 * i + 1] - angle.cos()) < 1e-6


TABLE = {  # the rows of docs/architecture.md: tied embeddings are the last column
    "classic": ("sinusoidal", "layer_norm", "post", "relu", "all", False, True),
    "gpt2": ("learned", "layer_norm", "pre", "gelu_tanh", "all", False, True),
    "gpt_neo": ("learned", "layer_norm", "pre", "gelu_tanh", "all but q, k, v", False, True),
    "gpt_neox": ("rotary", "layer_norm", "parallel", "gelu", "all", False, False),
    "llama": ("rotary", "rms_norm", "pre", "swiglu", "", False, True),
    "mistral": ("rotary", "rms_norm", "pre", "swiglu", "", False, False),
    "qwen2": ("rotary", "rms_norm", "pre", "swiglu", "q, k, v", False, True),
    "qwen3": ("rotary", "rms_norm", "pre", "swiglu", "", True, True),
    "phi3": ("rotary", "rms_norm", "pre", "swiglu", "", False, False),
    "gemma3": ("rotary", "rms_norm", "sandwich", "geglu", "", True, True),
    "olmo2": ("rotary", "rms_norm", "output", "swiglu", "", True, False),
    "smollm3": ("rotary", "rms_norm", "pre", "swiglu", "", False, True),
    "granite": ("rotary", "rms_norm", "pre", "swiglu", "", False, False),
    "starcoder2": ("rotary", "layer_norm", "pre", "gelu_tanh", "all", False, True),
    "gemma": ("rotary", "rms_norm", "pre", "geglu", "", False, True),
    "olmo": ("rotary", "layer_norm", "pre", "swiglu", "", False, False),
    "olmo3": ("rotary", "rms_norm", "output", "swiglu", "", True, False),
    "phi": ("rotary", "layer_norm", "shared", "gelu_tanh", "all", False, False),
    "gptj": ("rotary", "layer_norm", "shared", "gelu_tanh", "of the feed-forward", False, False),
    "opt": ("learned", "layer_norm", "pre", "relu", "all", False, True),
    "gpt_bigcode": ("learned", "layer_norm", "pre", "gelu_tanh", "all", False, True),
    "stablelm": ("rotary", "layer_norm", "pre", "swiglu", "", False, False),
    "cohere": ("rotary", "layer_norm", "shared", "swiglu", "", False, True),
    "cohere2": ("rotary", "layer_norm", "shared", "swiglu", "", False, True),
    "glm4": ("rotary", "rms_norm", "sandwich", "swiglu", "q, k, v", False, False),
    "ministral3": ("rotary", "rms_norm", "pre", "swiglu", "", False, False),
    "arcee": ("rotary", "rms_norm", "pre", "relu2", "", False, False),
    "seed_oss": ("rotary", "rms_norm", "pre", "swiglu", "q, k, v", False, False),
    "hunyuan": ("rotary", "rms_norm", "pre", "swiglu", "", True, True),
    "exaone4": ("rotary", "rms_norm", "output", "swiglu", "", True, False),
}
BIASES = {  # of q, k and v, of the output projection, of the feed-forward layer
    "all": (True, True, True),
    "all but q, k, v": (False, True, True),
    "q, k, v": (True, False, False),
    "of the feed-forward": (False, False, True),
    "": (False, False, False),
}
NORMS = {  # of a block, by placement
    "pre": {"attention_norm", "feed_forward_norm"},
    "output": {"attention_output_norm", "feed_forward_output_norm"},
}
NORMS |= dict.fromkeys(("post", "parallel"), NORMS["pre"])
NORMS["shared"] = {"attention_norm"}
NORMS["sandwich"] = NORMS["pre"] | NORMS["output"]


def test_families_match_the_documented_table():
    assert set(TABLE) == set(FAMILIES)
    for family, (position, norm, placement, activation, biases, qk_norm, tied) in TABLE.items():
        c = ModelConfig.of(family, vocab_size=300)
        row = (position, norm, placement, activation, qk_norm, tied)
        assert row == (
            *(c.position, c.norm, c.norm_placement, c.activation, c.qk_norm),
            c.tied_embeddings,
        )
        assert (c.attention_bias, c.output_bias, c.feed_forward_bias) == BIASES[biases]
        names = Transformer(c).state_dict()
        assert ("position_embedding.weight" in names) == (position == "learned")
        assert ("final_norm.weight" in names) == (placement != "post" and family != "olmo")
        assert ("blocks.0.attention.qkv_proj.bias" in names) == c.attention_bias
        assert ("blocks.0.feed_forward.gate_proj.weight" in names) == (activation[-3:] == "glu")
        assert ("blocks.0.attention.q_norm.weight" in names) == qk_norm
        assert ("lm_head.weight" in names) == (not tied)
        parts = {name.split(".")[2] for name in names if name.startswith("blocks.0.")}
        norms = {part for part in parts if part.endswith("_norm")}
        assert norms == (NORMS[placement] if family != "olmo" else set())
    assert ModelConfig.of("classic", vocab_size=300, d_model=64, n_heads=4).d_ff == 256


def test_parameter_shapes_are_those_of_the_model(any_family):
    for values in ({}, {"tied_embeddings": True}, {"tied_embeddings": False}):
        model = make_model(any_family, **values)
        own = sorted(tuple(p.shape) for p in model.parameters())
        listed = outer_shapes(model.config) + block_shapes(model.config) * model.config.n_layers
        assert sorted(listed) == own
        assert n_parameters(model.config) == sum(p.numel() for p in model.parameters())


def test_configuration_survives_json(any_family):
    config = make_model(any_family).config
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert ModelConfig.from_dict(values) == config
    if config.position == "rotary":
        own = {"phi3": SCALINGS[-1:], "gptj": [], "ministral3": []}
        for scaling in own.get(any_family, SCALINGS):
            scaled = dataclasses.replace(config, rope_scaling=scaling, rotary_dim=None, head_dim=8)
            values = json.loads(json.dumps(dataclasses.asdict(scaled)))
            assert ModelConfig.from_dict(values) == scaled


def test_configuration_of_an_older_version_is_read():
    """Early versions stored fewer fields of RoPE scaling."""
    config = make_model("llama").config
    four = ("factor", "low_freq_factor", "high_freq_factor", "original_context_length")
    scaled = dataclasses.asdict(dataclasses.replace(config, rope_scaling=SCALINGS[0]))
    scaled["rope_scaling"] = {name: scaled["rope_scaling"][name] for name in (*four, "kind")}
    assert ModelConfig.from_dict(scaled).rope_scaling == SCALINGS[0]


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("qwen3", {"n_heads": 0}),
        ("qwen3", {"n_heads": 5, "d_model": 32}),
        ("llama", {"n_heads": 4, "n_kv_heads": 3}),
        ("gpt2", {"n_heads": 4, "n_kv_heads": 2}),
        ("qwen3", {"d_model": -8}),
        ("qwen3", {"rope_theta": float("nan")}),
        ("nonsense", {}),
        ("qwen3", {"layers": 3}),
        ("qwen3", {"head_dim": 7}),
        ("gpt_neox", {"rotary_dim": 7}),
        ("gpt_neox", {"rotary_dim": 64}),
        ("gpt_neox", {"norm_placement": "sandwich"}),
        ("gpt_neox", {"n_kv_heads": 2}),
        ("gpt_neo", {"sliding_window": 4, "sliding_layers": (True,)}),
        ("gpt_neo", {"attention_scale": 0.5}),
        ("smollm3", {"rope_layers": (True, False)}),
        ("llama", {"rope_layers": (True,) * 4 + (False,)}),
        ("llama", {"sliding_window": 8}),
        ("gemma3", {"embedding_scale": 2.0}),
        ("gemma3", {"local_rope_theta": 0.0}),
        ("granite", {"logits_divisor": 0.0}),
        ("granite", {"residual_scale": float("inf")}),
        ("phi3", {"head_dim": 64}),
        ("phi3", {"rope_scaling": SCALINGS[-1]}),  # for another number of dimensions
        ("phi3", {"rope_scaling": SCALINGS[1]}),
        ("olmo2", {"qk_norm": False}),
        ("olmo2", {"norm_placement": "pre"}),
        ("gpt2", {"activation": "geglu"}),
        ("stablelm", {"norm_placement": "parallel"}),
        ("gpt_bigcode", {"n_heads": 4, "n_kv_heads": 2, "d_model": 64}),
        ("exaone4", {"sliding_window": 4, "rope_layers": (True,) * 4 + (False,)}),
        ("cohere2", {"rope_layers": None}),
        ("ministral3", {"rope_scaling": None}),
        ("ministral3", {"context_length": 20_000}),
    ],
)
def test_invalid_shapes_raise_with_a_hint(family, values):
    with pytest.raises(UsageError) as caught:
        ModelConfig.of(family, vocab_size=300, **values)
    assert caught.value.hint


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.kind)
def test_scaled_rope_gives_equal_cached_logits(scaling):
    model = make_model("llama", head_dim=8, rope_scaling=scaling).double()
    tokens = torch.arange(30)[None]
    cache = make_cache(model)
    with torch.no_grad():
        steps = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(30)], dim=1)
        assert (steps - model(tokens)).abs().max() <= 1e-9
        unscaled = make_model("llama", head_dim=8).double()(tokens)
        # Dynamic scaling changes only texts longer than the context.
        assert torch.allclose(steps, unscaled, atol=1e-3) == (scaling.kind == "dynamic")


def test_threads_are_limited_to_the_cpus():
    before = torch.get_num_threads()
    try:
        set_threads(1024)
        assert torch.get_num_threads() == cpu_count()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["classic", "llama"])
def test_unused_positions_of_a_long_context_take_no_memory(family):
    model = make_model(family, context_length=1 << 20)
    again = Transformer.from_arrays(model.config, model.to_arrays())
    for each in (model, again):
        assert sum(buffer.nbytes for buffer in each.buffers()) < 2_000_000


@pytest.mark.parametrize("family", ["classic", "llama"])
def test_tables_grow_with_the_text(family, monkeypatch):
    whole = make_model(family).double()
    monkeypatch.setattr(transformer, "_FIRST_POSITIONS", 8)
    model = make_model(family).double()
    assert max(len(buffer) for buffer in model.buffers()) == 8
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        cache = make_cache(model)
        parts = [model(tokens[:, i : i + 10], cache=cache) for i in range(0, 40, 10)]
        assert (torch.cat(parts, dim=1) - whole(tokens)).abs().max() <= 1e-9
        assert torch.equal(model(tokens), whole(tokens))


def test_tables_that_grew_while_sampling_can_be_trained_with(monkeypatch):
    monkeypatch.setattr(transformer, "_FIRST_POSITIONS", 8)
    model = make_model("llama")
    with torch.inference_mode():
        model(torch.arange(40)[None])
    model(torch.arange(40)[None]).sum().backward()
    assert model.token_embedding.weight.grad is not None


def test_sinusoidal_context_is_limited():
    with pytest.raises(UsageError, match="context_length: invalid value 50000000"):
        make_model("classic", context_length=50_000_000)
