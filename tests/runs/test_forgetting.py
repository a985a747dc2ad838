"""The general text of fine-tuning: after the plan, bounded, and the same when a run resumes."""

import json
from dataclasses import replace

import pytest

from support.models import make_model
from support.runs import contents, dry_run, load_run, request, resume, start_run
from tgen import runs
from tgen.checkpoint import model_dir
from tgen.config.training import TrainConfig
from tgen.errors import CorpusError
from tgen.lora import model_with_adapter
from tgen.planning import side_work
from tgen.reports.training import DoneReport, PhaseReport, PlanReport
from tgen.runs import forgetting, prepare, samples

WRITING = "writing the general text"


@pytest.fixture
def tuning(tmp_path, tokenizer, monkeypatch):
    for module, name in (
        (forgetting, "TEXT_TOKENS"),
        (side_work, "SAMPLE_TOKENS"),
        (side_work, "MEMORIZATION_TOKENS"),
    ):
        monkeypatch.setattr(module, name, 4)
    monkeypatch.setattr(prepare, "measure_speed", lambda *_, **__: 1e9)
    monkeypatch.setattr(prepare, "_MIN_BASELINE_BYTES", 0)
    model = make_model("llama", vocab_size=tokenizer.vocab_size, context_length=32)
    model_dir.save(tmp_path / "base", model.config, tokenizer, model.to_arrays())
    settings = {"eval_every": "3", "batch_size": "2"}
    plain = request(tmp_path, train=TrainConfig(steps=4, lora=2))
    return replace(plain, start_from=tmp_path / "base", overrides=settings)


def test_plan_comes_before_the_general_text_and_names_it(tuning):
    reports = list(runs.start(tuning))
    names = [getattr(report, "phase", type(report).__name__) for report in reports]
    assert list(dict.fromkeys(names[: names.index("StepReport")])) == [
        "loading the model",
        "measuring this machine",
        "reading the corpus",
        "tokenizing",
        "planning",
        "PlanReport",
        "baselines (xz, n-grams)",
        "making the model",
        "saving the first checkpoint",
        WRITING,
        "evaluating the general text",
        "first step",
    ]
    plan = next(report for report in reports if isinstance(report, PlanReport))
    choices = {choice.name: choice.value for choice in plan.choices}
    assert choices["general text"] == "64 texts of 16 tokens"
    done = reports[-1]
    assert isinstance(done, DoneReport)
    text = (tuning.out / "training" / "general.txt").read_bytes()
    tokenizer = model_with_adapter.load(tuning.out).tokenizer
    assert done.general_tokens == len(tokenizer.encode_corpus(text)[0])


def test_reading_the_users_general_text_is_a_phase_with_progress(tuning, tmp_path, monkeypatch):
    monkeypatch.setattr("tgen.runs.tokenizing._REPORT_SECONDS", 0.0)
    (tmp_path / "general.csv").write_bytes(b"text\n" + b"a line\n" * 9)
    reports = prepare.prepare(replace(tuning, general=tmp_path / "general.csv"), folder=None)
    phases = [next(reports) for _ in range(4)]
    assert phases[2].phase == phases[3].phase == "reading the general text"
    assert 0 < phases[3].fraction_done < 1
    (tmp_path / "general.csv").write_bytes(b"")
    with pytest.raises(CorpusError, match=r"^--general .* is empty"):
        list(prepare.prepare(replace(tuning, general=tmp_path / "general.csv"), folder=None))


def test_plan_says_that_a_general_text_of_one_token_measures_nothing(tuning, tmp_path):
    (tmp_path / "general.txt").write_bytes(b"x")
    plan = dry_run(replace(tuning, general=tmp_path / "general.txt"))
    [choice] = [one for one in plan.choices if one.name == "general text"]
    assert (choice.value, choice.why) == (
        "none",
        "the only token of the user's text follows no other",
    )


def test_run_stopped_before_its_general_text_resumes_to_the_same(tuning, tmp_path):
    list(runs.start(replace(tuning, out=tmp_path / "whole")))
    start_run(replace(tuning, out=tmp_path / "parts"))
    assert load_run(tmp_path / "parts")[0]["general_bits_per_byte"] is None
    phases = [
        one.phase for one in resume(tmp_path / "parts", threads=1) if isinstance(one, PhaseReport)
    ]
    assert WRITING in phases
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    whole, parts = (load_run(tmp_path / name)[0] for name in ("whole", "parts"))
    assert whole["general_bits_per_byte"] == parts["general_bits_per_byte"]


def test_run_stopped_after_a_step_keeps_its_loss_before(tuning):
    list(runs.start(tuning, stopped=lambda: True))
    before = load_run(tuning.out)[0]["general_bits_per_byte"]
    reports = resume(tuning.out, threads=1)
    names = [getattr(report, "phase", type(report).__name__) for report in reports]
    assert WRITING not in names
    assert names[names.index("PlanReport") + 1] == "first step"
    assert load_run(tuning.out)[0]["general_bits_per_byte"] == before


def test_resumed_run_writes_the_stored_number_of_texts(tuning, monkeypatch):
    start_run(tuning)
    path = tuning.out / "training" / "run.json"
    record = json.loads(path.read_text())
    assert record["plan"]["general_texts"] == 64
    record["plan"]["general_texts"] = 9
    path.write_text(json.dumps(record))
    n_texts, generate = [], samples.generate_texts

    def generate_texts(model, tokenizer, prompts, *args, **settings):
        n_texts.append(len(prompts))
        return generate(model, tokenizer, prompts, *args, **settings)

    monkeypatch.setattr(forgetting, "generate_texts", generate_texts)
    list(resume(tuning.out, threads=1))
    assert n_texts[0] == 9  # before samples and those that show memorization


def test_record_of_an_earlier_version_resumes_without_new_fields(tuning, tmp_path):
    list(runs.start(tuning, stopped=lambda: True))
    path = tmp_path / "model" / "training" / "run.json"
    record = json.loads(path.read_text())
    for name in ("general_texts", "general_tokens", "generated_tokens", "evaluated_tokens"):
        del record["plan"][name]
    path.write_text(json.dumps(record))
    done = list(resume(tmp_path / "model", threads=1))[-1]
    assert isinstance(done, DoneReport)
    assert done.general_after is not None
