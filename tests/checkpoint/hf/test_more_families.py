"""Families that combine the layers of others: each once against transformers, both ways."""

import numpy as np
import pytest
import torch

from support.families import COMBINED
from support.transformers_models import MORE_VARIANTS, make_theirs
from tgen.checkpoint import model_dir, safetensors_file
from tgen.checkpoint.hf.config import from_json, to_json
from tgen.checkpoint.hf.families import FAMILY_LAYOUTS
from tgen.config import EngineOptions
from tgen.engine.open_engine import open_engine

transformers = pytest.importorskip("transformers")

N_NEW = 50


def test_every_family_has_a_variant():
    kinds = {variant.partition(" ")[0] for variant in MORE_VARIANTS}
    assert kinds == {FAMILY_LAYOUTS[family].model_type for family in COMBINED}


@pytest.mark.parametrize("variant", MORE_VARIANTS)
def test_transformers_model_is_equal_and_is_written_back(variant, tokenizer, tmp_path):
    theirs = make_theirs(variant, tokenizer, tied=variant in ("gptj", "cohere2"))
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(tokenizer.json)
    random = torch.Generator().manual_seed(6)
    ids = torch.randint(2, tokenizer.vocab_size, (1, 30), generator=random)
    with torch.no_grad():
        text = theirs.generate(ids, max_new_tokens=N_NEW, do_sample=False)
        expected = theirs(text).logits[0].numpy()
    bundle = model_dir.load(tmp_path / "theirs")
    for kind in ("torch", "kernels"):
        options = EngineOptions(device="cpu", threads=1, kind=kind, dtype="float32")
        engine = open_engine(model_dir.load(tmp_path / "theirs"), options)
        parts = [text[0, :20].tolist(), text[0, 20:70].tolist(), *text[0, 70:, None].tolist()]
        logits = np.concatenate([engine.extend([part], every_position=True) for part in parts])
        assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
        assert logits[29:-1].argmax(1).tolist() == text[0, 30:].tolist()

    assert from_json(to_json(bundle.config, begin=0, end=0, pad=0)) == bundle.config
    model_dir.save(tmp_path / "ours", bundle.config, tokenizer, dict(bundle.arrays))
    paths = [tmp_path / name / "model.safetensors" for name in ("theirs", "ours")]
    before, after = (
        safetensors_file.read_arrays(path, safetensors_file.read_header(path)) for path in paths
    )
    assert before.keys() == after.keys()
    for name, array in before.items():
        unused = 2 if "embed_positions" in name else 0  # which OPT never reads
        assert np.array_equal(after[name][unused:], array[unused:])
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    with torch.no_grad():
        error = np.abs(again.eval()(text).logits[0].numpy() - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()
