"""The estimate of a step's duration: its FLOP, and durations measured on two CPUs."""

import pytest

from tgen.config import SIZES, ModelConfig
from tgen.config.training import ResolvedTrainConfig
from tgen.model.transformer import Transformer
from tgen.planning.costs import muon_flops, step_seconds
from tgen.training.optimizers import Muon, make_optimizers


def model(size: str) -> ModelConfig:
    return ModelConfig.of("qwen3", **SIZES[size], vocab_size=1024)


@pytest.mark.parametrize(
    ("precision", "gflops_per_second", "seconds"),
    [
        ("float32", 126.5, (0.0305, 0.0604, 0.1157, 0.2744, 1.1231)),
        ("bfloat16", 142.7, (0.0293, 0.0506, 0.0898, 0.1913, 0.6253)),
    ],
)
def test_estimate_is_within_a_tenth_of_measured_steps(precision, gflops_per_second, seconds):
    contexts = {"nano": 128, "micro": 128, "tiny": 128, "small": 256, "medium": 256}
    for (size, context), measured in zip(contexts.items(), seconds, strict=True):
        speed = gflops_per_second * 1e9
        estimate = step_seconds(
            model(size), 2048, speed, precision=precision, context=context, muon=True
        )
        assert estimate == pytest.approx(measured, rel=0.1)


def test_longer_windows_take_longer():
    # measured: nano, 0.39 seconds for a step of one window of 4,000 tokens at 62 GFLOP/s
    short, long = (
        step_seconds(model("nano"), 4000, 62e9, context=context, muon=True)
        for context in (128, 4000)
    )
    assert short < 0.2 < long == pytest.approx(0.39, rel=0.5)


def test_flop_of_muon_are_those_of_its_matrices():
    config = model("nano")
    muon, _ = make_optimizers(Transformer(config), ResolvedTrainConfig())
    assert isinstance(muon, Muon)
    total = 0
    for matrix in muon.param_groups[0]["params"]:
        short, long = sorted(matrix.shape)
        total += 5 * (2 * short**2 * long + 2 * short**3 + 2 * short**2 * long)
    assert muon_flops(config) == total


def test_muon_takes_a_larger_share_of_larger_models():
    shares = []
    for size in SIZES:
        with_muon, without = (
            step_seconds(model(size), 2048, 1e11, context=128, muon=muon) for muon in (True, False)
        )
        shares.append(1 - without / with_muon)
    assert shares == sorted(shares)
