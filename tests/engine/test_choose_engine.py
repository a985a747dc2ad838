"""The choice between the kernels and torch."""

import pytest

from tgen.engine.choose_engine import choose_engine, prefers_kernels
from tgen.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "device", "missing", "engine"),
    [
        ("auto", "cpu", None, "kernels"),
        ("auto", "cpu", "no llvmlite", "torch"),
        ("auto", "cuda", None, "torch"),
        ("auto", "mps", None, "torch"),
        ("kernels", "cpu", None, "kernels"),
        ("kernels", "auto", None, "kernels"),
        ("torch", "cpu", None, "torch"),
        ("torch", "cpu", "no llvmlite", "torch"),
        ("torch", "cuda", None, "torch"),
    ],
)
def test_engine_follows_from_kind_device_and_kernels(kind, device, missing, engine):
    assert choose_engine(kind, device, missing) == engine


@pytest.mark.parametrize(
    ("device", "missing", "reason"),
    [
        ("cuda", None, "kernels do not run on cuda"),
        ("mps", "no llvmlite", "kernels do not run on mps"),
        ("cpu", "no llvmlite", "no llvmlite"),
        ("auto", "no llvmlite", "no llvmlite"),
    ],
)
def test_unavailable_kernels_are_an_error_if_requested(device, missing, reason):
    with pytest.raises(UsageError, match=f"--engine kernels is not available: {reason}"):
        choose_engine("kernels", device, missing)


@pytest.mark.parametrize(
    ("platform", "n_weights", "missing", "preferred"),
    [
        ("darwin", 2_000_000, None, True),
        ("darwin", 499_999_999, None, True),
        ("darwin", 500_000_000, None, False),
        ("darwin", 2_000_000, "no llvmlite", False),
        ("linux", 2_000_000, None, True),
        ("linux", 20_000_000, None, False),
        ("linux", 2_000_000, "no llvmlite", False),
        ("win32", 2_000_000, None, False),
    ],
)
def test_kernels_are_the_default_for_small_models(platform, n_weights, missing, preferred):
    assert prefers_kernels(platform, n_weights, missing) == preferred
