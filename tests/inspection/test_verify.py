"""The self-checks of `tgen inspect --view verify` pass for every family, and detect errors."""

import math

import pytest
import torch

from support.models import ALL_FAMILIES, make_model
from tgen.inspection import logit_attribution as attribution_module
from tgen.inspection import logit_lens as lens_module
from tgen.inspection.attention import AttentionRecorder
from tgen.inspection.hooks import record_residuals
from tgen.inspection.verify import verify

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("family", [*ALL_FAMILIES, "olmo", "phi", "cohere"], indirect=True)
def test_all_checks_pass_for_every_family(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    for ids in (IDS, IDS[:9], IDS[:1]):
        checks = verify(model, tokenizer, ids)
        has_window = model.config.sliding_window is not None
        assert len(checks) == (7 if family == "classic" else 9 + has_window)
        assert all(check.passed for check in checks), checks


def test_each_check_detects_its_error(tokenizer, monkeypatch):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)

    def failed(checked=model):
        checks = verify(checked, tokenizer, IDS)
        return {check.name.split(":")[0] for check in checks if not check.passed}

    weights = {
        "weights times values equal the fused kernel's output",
        "weights equal the fused kernel's weights",
        "logits computed with these weights equal the model's",
    }
    assert not failed()
    original = AttentionRecorder.attention
    for wrong in (  # scaled, shifted keys, keys of another group
        lambda self, la, q, k, v, *rest: original(self, la, q * 1.01, k, v, *rest),
        lambda self, la, q, k, v, *rest: original(self, la, q, k.roll(1, dims=2), v, *rest),
        lambda self, la, q, k, v, *rest: original(self, la, q, k.flip(1), v, *rest),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(AttentionRecorder, "attention", wrong)
            assert failed() == weights
    attend = torch.nn.functional.scaled_dot_product_attention

    def not_causal(q, k, v, **options):
        return attend(q, k, v, **options | {"is_causal": False})

    def negative(*arguments, **options):
        return -attend(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", not_causal)
        assert failed() >= weights | {"weight on future keys is 0", "causality"}
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", negative)
        assert "no weight is negative" in failed()
    softmax = torch.Tensor.softmax
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", lambda x, dim: softmax(x, dim) * 1.001)
        assert failed() >= weights | {"attention rows sum to 1"}
    with monkeypatch.context() as patch:
        patch.setattr(
            lens_module, "record_residuals", lambda *a: (record_residuals(*a)[0][:1] * 3, None)
        )
        assert failed() == {"the logit lens at the last layer equals the model"}
    norm = attribution_module._through_norm
    with monkeypatch.context() as patch:
        patch.setattr(attribution_module, "_through_norm", lambda *a: (norm(*a)[0] * 1.01, None))
        assert failed() == {"logit contributions sum to the logit"}
    broken = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        broken.blocks[0].attention.qkv_proj.weight[0, 0] = math.nan
    assert failed(broken) >= weights | {"attention rows sum to 1"}


def test_weight_before_the_window_is_detected(tokenizer, monkeypatch):
    model = make_model("gemma3", vocab_size=tokenizer.vocab_size)
    attend = torch.nn.functional.scaled_dot_product_attention

    def without_window(q, k, v, *, attn_mask, is_causal, **options):
        del attn_mask, is_causal
        return attend(q, k, v, attn_mask=None, is_causal=True, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without_window)
    failed = {check.name for check in verify(model, tokenizer, IDS) if not check.passed}
    assert "weight on keys before the sliding window is 0" in failed
