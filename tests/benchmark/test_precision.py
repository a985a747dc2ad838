"""What weights in fewer bits cost: the difference of two losses, each as torch computes it."""

import json
import math

import pytest
import torch

from support.command import tgen
from support.models import make_model
from tgen.benchmark.precision import compare_weights
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.weights import from_int8, to_int8
from tgen.engine.torch_engine import TorchEngine
from tgen.model.transformer import Transformer


def nats(model, texts):
    total = 0.0
    for text in texts:
        logits = model(torch.tensor([text[:-1]]))[0]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:])) * 47)
    return total


def test_the_cost_is_the_difference_of_the_losses(family):
    model = make_model(family, d_model=64, n_heads=2)  # heads of whole groups of weights
    arrays = model.to_arrays()
    held = {n for n, a in arrays.items() if a.ndim == 2 and not n.startswith("position")}
    rounded = Transformer.from_arrays(
        model.config, arrays | {n: from_int8(to_int8(arrays[n])) for n in held}
    )
    engine = CpuEngine(model.config, arrays, n_threads=1, stored="int8")
    scored = []

    def decode(ids):
        scored.append([1, *ids])
        return b"x" * 25

    report = compare_weights(engine, TorchEngine(model), [1], decode=decode, seed=3)
    with torch.no_grad():
        held, exact = nats(rounded.eval(), scored), nats(model, scored)
        worst = max(
            float((rounded(one) - model(one)).abs().max())
            for one in (torch.tensor([text[:-1]]) for text in scored)
        )
    assert report.bits_per_byte == pytest.approx(held / math.log(2) / 200, rel=2e-6)
    assert report.exact_bits_per_byte == pytest.approx(exact / math.log(2) / 200, rel=2e-6)
    assert abs(held - exact) > 1e-5 * exact  # or the test shows nothing
    assert report.max_logit_difference == pytest.approx(worst, abs=1e-4)
    assert (report.stored, report.exact, report.tokens) == ("int8", "float32", 8 * 47)
    assert {len(text) for text in scored} == {48}
    same = CpuEngine(model.config, model.to_arrays(), n_threads=1)
    assert compare_weights(same, TorchEngine(model), [1], decode=decode, seed=3) is None


def test_the_command_says_what_int8_costs(trained):
    run = ["bench", "-m", trained, "-r", 1, "-p", 4, "-n", 0, "--no-limits", "--device", "cpu"]
    shown = tgen(*run, "--weights", "int8", "--json")
    assert shown.returncode == 0, shown.stderr.decode()
    (row,) = json.loads(shown.stdout)
    precision = row["precision"]
    assert 0 < abs(precision["bits_per_byte"] - precision["exact_bits_per_byte"]) < 0.1
    assert (precision["stored"], precision["exact"]) == ("int8", "float32")
    assert b"int8 weights: " in tgen(*run, "--weights", "int8").stdout
    (row,) = json.loads(tgen(*run, "--weights", "float32", "--json").stdout)
    assert row["precision"] is None
