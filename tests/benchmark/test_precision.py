"""The cost of weights in fewer bits is the difference of two losses that torch computes."""

import json
import math

import pytest
import torch

from support.command import tgen
from support.models import cpu_engine, make_model
from tgen.benchmark.sweep import compare_precision
from tgen.engine.torch_engine import TorchEngine
from tgen.model.transformer import Transformer


@torch.no_grad()
def nats(model, texts):
    total = 0.0
    for text in texts:
        logits = model(torch.tensor([text[:-1]]))[0]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:])) * 47)
    return total


@torch.no_grad()
def largest_difference(a, b, texts):
    inputs = [torch.tensor([text[:-1]]) for text in texts]
    return max(float((a(one) - b(one)).abs().max()) for one in inputs)


def exact_and_rounded(family):
    """A model, and the same with its matrices rounded to bfloat16.

    The matrices are twice as large as usual, so that rounding is not lost among the logits.
    """
    model = make_model(family, d_model=64, n_heads=2, head_dim=32)
    arrays = model.to_arrays()
    matrices = {n for n, a in arrays.items() if a.ndim == 2 and not n.startswith("position")}
    arrays |= {n: arrays[n] * 2 for n in matrices}
    rounded = {n: torch.tensor(arrays[n]).bfloat16().float().numpy() for n in matrices}
    return tuple(
        Transformer.from_arrays(model.config, one).eval() for one in (arrays, arrays | rounded)
    )


def test_cost_is_the_difference_of_the_losses(family):
    model, rounded = exact_and_rounded(family)
    engine = cpu_engine(model.config, rounded.to_arrays(), n_threads=1)
    engine.dtype = "bfloat16"
    scored = []

    def decode(ids):
        scored.append([1, *ids])
        return b"x" * 25

    report = compare_precision(engine, TorchEngine(model), [1], decode=decode, seed=3)
    assert {len(text) for text in scored} == {48}
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    assert report.tokens == 8 * 47
    bits, reference = nats(rounded, scored), nats(model, scored)
    assert report.bits_per_byte == pytest.approx(bits / math.log(2) / 200, rel=2e-6)
    assert report.reference_bits_per_byte == pytest.approx(reference / math.log(2) / 200, rel=2e-6)
    assert abs(bits - reference) > 1e-5 * reference  # otherwise the test proves nothing
    worst = largest_difference(rounded, model, scored)
    assert report.max_logit_difference == pytest.approx(worst, abs=1e-4)


def test_the_same_dtype_has_no_cost(family):
    model = make_model(family)
    same = cpu_engine(model.config, model.to_arrays(), n_threads=1)
    assert compare_precision(same, TorchEngine(model), [1], decode=bytes, seed=3) is None


def test_command_shows_the_cost_of_int8(trained):
    run = ["bench", "-m", trained, "-r", 1, "-p", 4, "-n", 0, "--no-limits", "--device", "cpu"]
    shown = tgen(*run, "--dtype", "int8", "--json")
    assert shown.returncode == 0, shown.stderr.decode()
    (row,) = json.loads(shown.stdout)
    precision = row["precision"]
    assert 0 < abs(precision["bits_per_byte"] - precision["reference_bits_per_byte"]) < 0.1
    assert (precision["dtype"], precision["reference_dtype"]) == ("int8", "float32")
    assert b"int8 weights: " in tgen(*run, "--dtype", "int8").stdout
    (row,) = json.loads(tgen(*run, "--dtype", "float32", "--json").stdout)
    assert row["precision"] is None
