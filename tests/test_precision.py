"""What weights in fewer bits cost: the difference of two losses, each as torch computes it."""

import json
import math

import numpy as np
import pytest
import torch

from conftest import make_model, tgen
from tgen.benchmark.precision import compare_weights
from tgen.engine.cpu.engine import CpuEngine
from tgen.engine.cpu.weights import to_bfloat16, to_float32
from tgen.engine.torch_engine import TorchEngine
from tgen.model.transformer import Transformer


def nats(model, texts):
    total = 0.0
    for text in texts:
        logits = model(torch.tensor([text[:-1]]))[0]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:])) * 47)
    return total


def test_the_cost_is_the_difference_of_the_losses(family):
    model = make_model(family)
    arrays = model.to_arrays()
    rounded = Transformer.from_arrays(
        model.config,
        {n: to_float32(to_bfloat16(a)) if a.ndim == 2 else a for n, a in arrays.items()},
    )
    texts = [np.random.default_rng(i).integers(0, 300, 48).tolist() for i in range(3)]
    engine = CpuEngine(model.config, arrays, n_threads=1, stored="bfloat16")
    report = compare_weights(engine, TorchEngine(model), texts, n_bytes=200)
    with torch.no_grad():
        held, exact = nats(rounded.eval(), texts), nats(model, texts)
    assert report.bits_per_byte == pytest.approx(held / math.log(2) / 200, rel=1e-5)
    assert report.exact_bits_per_byte == pytest.approx(exact / math.log(2) / 200, rel=1e-5)
    assert abs(held - exact) > 1e-4 * exact  # or the test shows nothing
    assert (report.stored, report.exact, report.tokens) == ("bfloat16", "float32", 3 * 47)


def test_the_command_says_what_int8_costs(trained):
    run = ["bench", "-m", trained, "-r", 1, "-l", 4, "--device", "cpu"]
    shown = tgen(*run, "--weights", "int8", "--json")
    assert shown.returncode == 0, shown.stderr.decode()
    precision = json.loads(shown.stdout)["precision"]
    assert 0 < abs(precision["bits_per_byte"] - precision["exact_bits_per_byte"]) < 0.1
    assert b"int8 weights: " in tgen(*run, "--weights", "int8").stdout
    assert json.loads(tgen(*run, "--weights", "float32", "--json").stdout)["precision"] is None
