"""The samplers of the pages equal those of generation."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tgen
from tgen.config import SamplingConfig
from tgen.generation.distribution import logits_record, sampling_distribution
from tgen.generation.vocabulary import Vocabulary

SOURCE = Path(tgen.__file__).parent / "drawing" / "page" / "samplers.js"
NODE = shutil.which("node")
PROGRAM = """
import { distribution, readLogits } from './samplers.mjs';
import { readFileSync } from 'node:fs';
const { records, settings } = JSON.parse(readFileSync(0));
console.log(JSON.stringify(records.map(({ record, counts }) => {
  const { candidates, rest } = readLogits(record);
  for (const one of candidates) one.count = counts[one.id] ?? 0;
  return settings.map((one) => distribution(candidates, rest, one));
})));
"""
SETTINGS: list[dict[str, Any]] = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.1, 0.7, 1, 2)
    for k, p, m in [
        (0, 1, 0),
        (40, 1, 0),
        (0, 0.9, 0),
        (0, 0.99, 0),
        (0, 1, 0.05),
        (700, 0.8, 0.01),
    ]
]
SETTINGS += [
    dict(temperature=0, top_k=40, top_p=1, min_p=0),
    dict(temperature=0, top_k=0, top_p=1, min_p=0, samplers=["top_k"]),
    dict(temperature=0.5, top_k=20, top_p=0.7, min_p=0, samplers=["temperature", "top_p", "top_k"]),
    dict(temperature=1.3, top_k=9, top_p=0.9, min_p=0, repetition_penalty=1.4),
    dict(temperature=1, top_k=0, top_p=1, min_p=0, presence_penalty=1, frequency_penalty=0.5),
]
TEXT = [3, 5, 5, 250]


def run(records, settings, folder):
    shutil.copy(SOURCE, folder / "samplers.mjs")
    (folder / "program.mjs").write_text(PROGRAM)
    done = subprocess.run(
        [str(NODE), folder / "program.mjs"],
        input=json.dumps({"records": records, "settings": settings}).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def logits_of(kind, size):
    random = np.random.default_rng(4)
    if kind == "normal":
        logits = random.normal(size=size) * 3
    elif kind == "flat":
        logits = random.normal(size=size) * 0.01
    elif kind == "peaked":
        logits = random.normal(size=size) * 2
        logits[17] = 40
    else:  # lumps just below the listed ones
        logits = np.where(random.random(size) < 0.01, 9 + random.random(size), random.random(size))
    logits = logits.astype(np.float32)
    logits[200] = -np.inf
    return logits


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("size", [300, 8192, 9000, 150_000])
@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "lumps"])
def test_probabilities_equal_those_of_the_samplers(kind, size, tmp_path):
    logits = logits_of(kind, size)
    counts = {i: TEXT.count(i) for i in TEXT}
    record = {"record": logits_record(logits, TEXT), "counts": counts}
    # Large lists take long, above all those with all tokens.
    settings_of_size = SETTINGS[:: {300: 1, 8192: 10}.get(size, 5)]
    [results] = run([record], settings_of_size, tmp_path)
    vocabulary = Vocabulary()
    for settings, result in zip(settings_of_size, results, strict=True):
        listed = [row["id"] for row in result["rows"]]
        sampling = SamplingConfig(**settings)
        expected = sampling_distribution(logits, TEXT, sampling, vocabulary, top=1, also=listed)
        by_id = {one.id: one for one in expected.candidates}
        for row in result["rows"]:
            one = by_id[row["id"]]
            # Thousands of rows: `approx` takes longer than the samplers.
            assert abs(row["probability"] - one.final) <= 1e-3, settings
            assert abs(row["model"] - one.probability) <= 1e-3, settings
            if size <= 8192 and max(one.final, one.probability) > 1e-3:
                assert row["removedBy"] == one.removed_by
        rest = 1 - sum(by_id[i].final for i in listed)
        assert result["restProbability"] == pytest.approx(rest, abs=1e-3), settings
        steps = [step for step in expected.steps if step.sampler != "penalties"]
        for step, ours in zip(steps, result["steps"], strict=True):
            assert ours["sampler"] == step.sampler
            assert ours["probability"] == pytest.approx(step.probability, abs=2e-3), settings


def test_records_stay_small():
    assert len(json.dumps(logits_record(logits_of("normal", 8192)))) < 25_000
    record = logits_record(logits_of("normal", 150_000))
    assert len(record["ids"]) == 500
    assert sum(record["counts"]) == 150_000 - 1 - 500
    assert len(json.dumps(record)) < 80_000
