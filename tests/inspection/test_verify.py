"""Each check of `tgen inspect --view verify` holds for every family, and finds what it is for."""

import math

import torch

from support.models import make_model
from tgen.inspection import logit_attribution as why_module
from tgen.inspection import logit_lens as lens_module
from tgen.inspection import verify as verify_module
from tgen.inspection.attention import AttentionRecorder
from tgen.inspection.hooks import residuals
from tgen.inspection.verify import verify

IDS = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def test_everything_holds_for_every_family(family, tokenizer):
    model = make_model(family, vocab_size=tokenizer.vocab_size)
    for ids in (IDS, IDS[:9], IDS[:1]):
        checks = verify(model, tokenizer, ids)
        assert len(checks) == (7 if family == "classic" else 9)
        assert all(check.holds for check in checks), checks


def test_each_check_finds_what_it_is_for(tokenizer, monkeypatch):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size)

    def failing(of=model):
        return {check.name.split(":")[0] for check in verify(of, tokenizer, IDS) if not check.holds}

    weights = {
        "weights times values are the fused kernel's result",
        "weights are the kernel's own",
        "logits with these weights in the kernel's place",
    }
    assert not failing()
    honest = AttentionRecorder.attention
    for wrong in (  # warmer, another position's keys, another group's keys
        lambda self, la, q, k, v, *rest: honest(self, la, q * 1.01, k, v, *rest),
        lambda self, la, q, k, v, *rest: honest(self, la, q, k.roll(1, dims=2), v, *rest),
        lambda self, la, q, k, v, *rest: honest(self, la, q, k.flip(1), v, *rest),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(AttentionRecorder, "attention", wrong)
            assert failing() == weights
    attend = torch.nn.functional.scaled_dot_product_attention

    def looks_ahead(q, k, v, **options):
        return attend(q, k, v, **options | {"is_causal": False})

    def negative(*arguments, **options):
        return -attend(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(verify_module.F, "scaled_dot_product_attention", looks_ahead)
        assert failing() >= weights | {"the future's weight", "causality"}
        patch.setattr(verify_module.F, "scaled_dot_product_attention", negative)
        assert "weights below 0" in failing()
    softmax = torch.Tensor.softmax
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", lambda x, dim: softmax(x, dim) * 1.001)
        assert failing() >= weights | {"rows sum to 1"}
    with monkeypatch.context() as patch:
        patch.setattr(lens_module, "residuals", lambda *a: (residuals(*a)[0][:1] * 3, None))
        assert failing() == {"the lens's last layer is the model"}
    norm = why_module._through_norm
    with monkeypatch.context() as patch:
        patch.setattr(why_module, "_through_norm", lambda *a: (norm(*a)[0] * 1.01, None))
        assert failing() == {"the parts of a logit sum to it"}
    broken = make_model("qwen3", vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        broken.blocks[0].attention.qkv_proj.weight[0, 0] = math.nan
    assert failing(broken) >= weights | {"rows sum to 1"}
