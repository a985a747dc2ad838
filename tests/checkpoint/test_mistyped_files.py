"""Each value of a model's JSON files is replaced: the model loads, or one error says why not."""

import dataclasses
import json
import math

import pytest

from support.models import make_model
from tgen.checkpoint import chat_template, model_dir, model_files
from tgen.config import RopeScaling
from tgen.errors import ModelError, TgenError

GONE = object()
VALUES = [
    GONE, None, True, "false", -1, 0, 1.5, 10**400, float("inf"), float("nan"),
    [], {}, [[]], {"a": 1},
]  # fmt: skip


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def chat_model(request, tokenizer, tmp_path_factory):
    """A directory with every JSON file and as many keys as possible."""
    family = request.param
    rope = {"rope_scaling": RopeScaling(factor=2.0)} if family == "llama" else {}
    model = make_model(family, vocab_size=300, n_layers=1, d_model=8, n_heads=2, **rope)
    path = tmp_path_factory.mktemp("chat") / family
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    names = ("bos_token", "eos_token")
    (path / "special_tokens_map.json").write_text(json.dumps(dict.fromkeys(names, "a")))
    added = {
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": "x"}]},
        "config.json": {"layer_types": ["full_attention"], "head_dim": None, "n_inner": 32},
        "generation_config.json": {"top_p": 0.5, "num_beams": 1, "max_new_tokens": 5},
    }
    for name, values in added.items():
        known = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(values | known))
    return path


def replaced(values, value):
    """Yield copies in each of which one value is replaced, or gone, at any depth."""
    for key, inner in values.items():
        rest = {k: v for k, v in values.items() if k != key}
        yield rest if value is GONE else {**values, key: value}
        if isinstance(inner, list) and inner:
            items = dict(enumerate(inner))
            yield from ({**values, key: list(new.values())} for new in replaced(items, value))
        elif isinstance(inner, dict):
            yield from ({**values, key: new} for new in replaced(inner, value))


def error_of(path):
    """Use everything that a model's JSON files say; return the error."""
    try:
        use(path)
    except TgenError as error:
        return error
    return None


def use(path):
    bundle = model_dir.load(path)
    inherited = model_dir.inherited_settings(bundle)
    model_dir.build_metadata_files(bundle.config, bundle.tokenizer, inherited=inherited)
    json.dumps(dataclasses.asdict(inherited))
    chat_template.read_chat_template(path)


@pytest.mark.parametrize(
    ("chat_model", "name"),
    [
        ("gpt2", "config.json"),
        ("llama", "config.json"),
        ("llama", "generation_config.json"),
        ("llama", "tokenizer_config.json"),
        ("llama", "special_tokens_map.json"),
    ],
    indirect=["chat_model"],
)
def test_mistyped_value_is_one_short_error_or_ignored(chat_model, name):
    original = (chat_model / name).read_bytes()
    n_errors = 0
    try:
        for value in VALUES:
            whole_files = [] if value is GONE else [value]
            for changed in [*replaced(json.loads(original), value), *whole_files]:
                (chat_model / name).write_text(json.dumps(changed))
                if error := error_of(chat_model):
                    n_errors += 1
                    assert "\n" not in error.message
                    assert len(error.message) < 1000
                    assert error.hint
    finally:
        (chat_model / name).write_bytes(original)
    assert n_errors or name != "config.json"
    use(chat_model)


@pytest.mark.parametrize("chat_model", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "values",
    [
        {"tie_word_embeddings": "false"},
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**400},
        {"rms_norm_eps": "1e-5"},
        {"attention_bias": 1},
    ],
)
def test_mistyped_value_of_config_is_named(chat_model, values):
    original = (chat_model / "config.json").read_bytes()
    (chat_model / "config.json").write_text(json.dumps(json.loads(original) | values))
    try:
        with pytest.raises(ModelError, match=next(iter(values))):
            model_dir.load(chat_model)
    finally:
        (chat_model / "config.json").write_bytes(original)


@pytest.mark.parametrize("shape", [[300, 8, 1], [1] * 65, [2400]])
def test_head_of_a_tied_model_has_the_shape_of_the_embedding(chat_model, shape):
    file = chat_model / model_files.WEIGHTS
    original = file.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    header, n = json.loads(original[8:end]), len(original) - end
    size = 4 * math.prod(shape)
    header["lm_head.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [n, n + size]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + original[end:] + bytes(size))
    try:
        with pytest.raises(ModelError, match=r"lm_head\.weight|65 dimensions"):
            model_dir.load(chat_model)
    finally:
        file.write_bytes(original)
