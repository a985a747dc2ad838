"""The run record: reading inverts writing, or is an error."""

import dataclasses
import json
import shutil

import pytest

from support.models import ALL_FAMILIES, make_model
from support.runs import load_run, request, resume, start_run
from tgen import runs
from tgen.config import RopeScaling
from tgen.errors import TrainingError
from tgen.runs.run_record import RunRecord


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    run_request = request(tmp_path_factory.mktemp("record"))
    start_run(run_request)
    return load_run(run_request.out)[0]


def test_record_survives_json(written):
    record = dataclasses.replace(RunRecord.from_dict(written), sample_prompt=b"\xff na\xc3\xafve")
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert RunRecord.from_dict(written).to_dict() == written


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_record_of_a_run_from_any_family_survives_json(written, family):
    config = make_model(family).config
    if family == "phi3":
        factors = (1.0, 2.0, 3.0)
        scaling = {
            "kind": "longrope",
            "factor": 2.0,
            "short_factor": factors,
            "long_factor": factors,
        }
        config = dataclasses.replace(config, rope_scaling=RopeScaling(**scaling))
    record = RunRecord.from_dict(written)
    plan = dataclasses.replace(record.plan, model=config, context_length=config.context_length)
    record = dataclasses.replace(record, plan=plan)
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.parametrize(
    "damage",
    [
        {"sample_prompt": None},
        {"exact_epochs": False},
        {"sample_prompt": "\ud800"},
        {"plan": {}},
        {"tokenizer": "bpe"},
        {"threads": "2"},
        {"threads": True},
        {"corpus": "a.txt"},
        {"corpus_bytes": 10**400},
        {"baselines": {"xz": "1"}},
        {"ngrams": "false"},
        {"inherited": [1]},
        {"inherited": {"end_ids": "ab"}},
        {"inherited": {"end_ids": [True]}},
        {"inherited": {"special_tokens": {"bos_token": 1}}},
        {"inherited": {"chat_template": 1}},
        {"inherited": {"generation_config": [1]}},
        {"of_another_version": 1},
    ],
)
def test_damaged_record_is_an_error(written, damage):
    with pytest.raises(TrainingError, match="damaged or was written by another version"):
        RunRecord.from_dict(written | damage)


def test_impossible_or_missing_field_is_an_error(written):
    wild = {"plan": written["plan"] | {"train": written["plan"]["train"] | {"dropout": 7}}}
    longer = {"plan": written["plan"] | {"context_length": 65_536}}
    missing = {name: written[name] for name in written if name != "threads"}
    for values in (written | wild, written | longer, missing):
        with pytest.raises(TrainingError, match="damaged or was written by another version"):
            RunRecord.from_dict(values)


def test_run_without_a_state_does_not_start_again(tmp_path):
    stops = iter([False, True])
    list(runs.start(request(tmp_path), stopped=lambda: next(stops)))
    for state in (tmp_path / "model" / "training").glob("state-*"):
        shutil.rmtree(state)
    with pytest.raises(TrainingError, match="has no training state"):
        list(resume(tmp_path / "model"))
