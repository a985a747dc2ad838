"""The language model inside a model with images."""

import json

import numpy as np
import pytest
import torch

from support.transformers_models import GROUPED
from tgen.checkpoint import export, model_dir
from tgen.checkpoint.hf.config import from_json
from tgen.config import EngineOptions
from tgen.engine.open_engine import open_engine
from tgen.errors import ModelError

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def make_theirs(kind, vocab_size):
    torch.manual_seed(0)
    text = GROUPED | {"vocab_size": vocab_size, "head_dim": 12, "initializer_range": 0.2}
    if kind == "gemma3":
        text |= {"sliding_window": 9, "num_hidden_layers": 7}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4
        )
        return transformers.Gemma3ForConditionalGeneration(config).eval()
    config = transformers.Mistral3Config(
        text_config=text | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral"},
    )
    return transformers.Mistral3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_has_the_logits_of_transformers(kind, prefix, tokenizer, tmp_path):
    theirs = make_theirs(kind, tokenizer.vocab_size)
    stored = theirs.state_dict()
    others = ("model.vision_tower.", "model.multi_modal_projector.")
    names = {n: n.replace("model.language_model.", prefix) for n in stored if n != "lm_head.weight"}
    names |= {n: n.removeprefix("model.") for n in stored if n.startswith(others)}
    if kind == "mistral3":
        before = prefix.startswith("language_model.")
        names["lm_head.weight"] = "language_model." * before + "lm_head.weight"
    path = tmp_path / "it"
    path.mkdir()
    torch.save({name: stored[n] for n, name in names.items()}, path / "pytorch_model.bin")
    theirs.config.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer.json)
    bundle = model_dir.load(path)
    assert bundle.warnings == ("this is a model with images, of which only the text part is used",)
    out = tmp_path / "out"
    export.export_transformers(
        bundle, out, stored="f32", max_shard_bytes=1 << 30, progress=lambda _: None
    )
    inherited = json.loads(model_dir.inherited_settings(bundle).contents["config.json"])
    for written in (inherited, json.loads((out / "config.json").read_text())):
        assert "vision_config" not in written
        assert from_json(written) == bundle.config
    assert model_dir.load(out).warnings == ()

    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 40).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, -1].numpy()
    engine = open_engine(bundle, EngineOptions(device="cpu", threads=1, dtype="float32"))
    np.testing.assert_allclose(engine.extend([ids])[0], expected, atol=1e-5)


def test_omitted_keys_are_the_defaults_of_transformers():
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    theirs = transformers.Gemma3Config(text_config=inner | scaling).text_config.to_dict()
    ours = from_json({"model_type": "gemma3", "text_config": inner | scaling})
    assert from_json(theirs) == ours


def test_other_models_with_images_are_refused():
    with pytest.raises(ModelError, match="unknown model type 'llava'") as error:
        from_json({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert "a model with images; save its text part alone, of type llama" in error.value.hint
