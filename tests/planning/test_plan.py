"""The plan: a pure function of the corpus, the time budget and the machine."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from support.runs import dry_run, request, start_run
from tgen.config import SIZES, ModelConfig, RopeScaling
from tgen.config.training import Precision, ResolvedTrainConfig, TrainConfig
from tgen.errors import CorpusError, UsageError
from tgen.model.transformer import Transformer
from tgen.planning.costs import MeasuredStep, n_parameters
from tgen.planning.memory import activation_bytes, rank_memory
from tgen.planning.model_size import PlanInputs
from tgen.planning.plan import Plan, make_plan
from tgen.runs.overrides import parse_overrides

ORDER = list(SIZES)


def plan(train_tokens: int, minutes: float = 10, **values: Any) -> Plan:
    inputs = PlanInputs(
        vocab_size=values.pop("vocab_size", 1024),
        train_tokens=train_tokens,
        val_tokens=train_tokens // 9,
        has_merges=values.pop("has_merges", False),
        flops_per_second=values.pop("flops_per_second", 1e11),
        bfloat16_flops_per_second=values.pop("bfloat16_flops_per_second", None),
        memory=values.pop("memory", None),
        rank_memory=values.pop("rank_memory", None),
        n_ranks=values.pop("n_ranks", 1),
        on_cpu=values.pop("on_cpu", False),
        measured_step=values.pop("measured_step", None),
        setup_seconds=values.pop("setup_seconds", 0.0),
    )
    model_fields, train_fields = parse_overrides(values.pop("overrides", {}))
    train = replace(values.pop("train", TrainConfig(minutes=minutes)), **train_fields)
    defaults = dict(family="qwen3", size=None, train=train, model_fields=model_fields)
    return make_plan(**defaults | values, inputs=inputs)


@pytest.mark.parametrize("train_tokens", [2, 180, 18_000, 400_000, 300_000_000])
@pytest.mark.parametrize("minutes", [0.1, 10, 1000])
def test_every_corpus_has_a_plan(train_tokens, minutes):
    chosen = plan(train_tokens, minutes)
    assert chosen == plan(train_tokens, minutes)
    assert 1 <= chosen.context_length < train_tokens
    assert chosen.context_length == chosen.model.context_length
    assert chosen.train.batch_size >= 1
    assert all(choice.why for choice in chosen.choices)


def test_number_of_steps_gives_the_same_run_on_a_faster_machine():
    train = TrainConfig(steps=400)
    slow, fast = (
        plan(98_659, train=train, on_cpu=True, flops_per_second=speed).train
        for speed in (1e10, 1e12)
    )
    assert slow == fast


@pytest.mark.parametrize("train_tokens", [0, 1])
def test_corpus_too_short_to_learn_from_is_refused(train_tokens):
    with pytest.raises(
        CorpusError, match=rf"too short \(training tokens: {train_tokens}\)"
    ) as error:
        plan(train_tokens)
    assert "at least 2 tokens" in error.value.hint


def test_short_corpus_has_a_note():
    assert any("very short (999 training tokens)" in note for note in plan(999).notes)
    assert not any("very short" in note for note in plan(1000).notes)


def test_more_time_or_text_gives_larger_models_and_more_epochs_more_dropout():
    sizes = [plan(400_000, minutes).size for minutes in (0.1, 1, 10, 100, 10_000)]
    assert sizes == sorted(sizes, key=ORDER.index)
    assert sizes[0] != sizes[-1]
    sizes = [plan(n, 10_000).size for n in (1_000, 100_000, 10_000_000)]
    assert sizes == sorted(sizes, key=ORDER.index)
    assert sizes[0] != sizes[-1]
    faster = plan(40_000_000, 10, flops_per_second=1e13).size
    assert ORDER.index(faster) > ORDER.index(plan(40_000_000, 10).size)
    assert plan(10**9, 1).train.dropout == 0 < plan(10_000, 100).train.dropout


def test_plan_has_the_asked_number_of_parameters():
    models = [
        plan(400_000, family=family, parameters=250_000, vocab_size=2048)
        for family in ("gpt2", "llama", "qwen3", "classic")
    ]
    for chosen in models:
        assert abs(n_parameters(chosen.model) / 250_000 - 1) <= 0.02
        (size,) = [choice for choice in chosen.choices if choice.name == "size"]
        assert size.value == "250,000 parameters"
        assert f"{n_parameters(chosen.model):,}" in size.why
    assert len({chosen.size for chosen in models}) == 1


def test_precision_is_the_faster_one_and_with_steps_that_of_the_device():
    def precision(speed: float | None, **values: Any) -> str:
        return plan(400_000, bfloat16_flops_per_second=speed, **values).train.precision

    assert [precision(speed) for speed in (None, 0.9e11, 1.04e11)] == ["float32"] * 3
    assert precision(1.2e11) == "bfloat16"
    assert precision(1.2e11, overrides={"precision": "float32"}) == "float32"
    steps = TrainConfig(steps=100)  # measurements do not change the run
    assert [precision(speed, train=steps) for speed in (0.9e11, 2e11)] == ["bfloat16"] * 2
    assert precision(None, train=steps) == "float32"


@pytest.mark.parametrize(("on_cpu", "step_tokens"), [(True, 2048), (False, 16_384)])
def test_number_of_steps_follows_from_a_measured_step(on_cpu, step_tokens):
    step = MeasuredStep(step_tokens, 0.5, 0.01)
    chosen = plan(400_000, minutes=10, on_cpu=on_cpu, measured_step=step)
    steps = next(choice for choice in chosen.choices if choice.name == "steps")
    assert (steps.value, steps.why) == (
        "about 1,100",
        "a step takes 0.5 seconds here",
    )  # 95% of 1200


def test_steps_of_a_short_run_leave_time_for_the_rest():
    def steps(seconds: float) -> int:
        step = MeasuredStep(2048, 0.01, 0.0)
        values = dict(on_cpu=True, measured_step=step, setup_seconds=seconds)
        chosen = plan(400_000, minutes=0.2, **values).choices
        value = next(choice.value for choice in chosen if choice.name == "steps")
        return int(value.removeprefix("about ").replace(",", ""))

    assert 900 < steps(0) < 1050  # of 1140: the last evaluation takes the rest
    assert steps(0) - steps(4) == pytest.approx(0.95 * 400, rel=0.05)
    assert steps(20) == 1


def test_hardly_any_steps_have_a_note():
    note, evaluations = plan(40_000_000, 0.2, size="large").notes
    assert "will fit into 0.2 minutes" in note
    assert evaluations.endswith("held-out tokens; all would take too long")
    assert not plan(400_000, 10).notes


def test_maximum_of_steps_is_for_minutes():
    with pytest.raises(UsageError, match="max_steps=5 cannot be combined with --steps 100"):
        plan(400_000, train=TrainConfig(steps=100), overrides={"max_steps": "5"})


@pytest.mark.parametrize(
    ("train", "n_ranks", "is_measured"),
    [
        (TrainConfig(minutes=5), None, True),
        (TrainConfig(steps=9), None, False),  # nothing to estimate
        (TrainConfig(minutes=0.001), None, False),  # would take too much of the time
        (TrainConfig(minutes=5), 64, False),  # an estimate for other machines
    ],
)
def test_steps_of_the_chosen_model_are_measured(tmp_path, monkeypatch, train, n_ranks, is_measured):
    measured: list[tuple[ModelConfig, ResolvedTrainConfig]] = []

    def measure_step(
        model: ModelConfig,
        config: ResolvedTrainConfig,
        device: torch.device,  # noqa: ARG001
        *,
        seconds: float,  # noqa: ARG001
    ) -> MeasuredStep:
        measured.append((model, config))
        return MeasuredStep(config.batch_size * model.context_length, 0.5, 0.0)

    monkeypatch.setattr("tgen.runs.prepare.measure_step", measure_step)
    shown = dry_run(request(tmp_path, train=train, n_ranks=n_ranks))
    assert len(measured) == is_measured
    if measured:
        ((model, config),) = measured
        assert (model.d_model, config.batch_size) == (shown.shape["d_model"], shown.batch_size)
        assert "a step takes 0.5 seconds here" in [choice.why for choice in shown.choices]


def step_tokens(size: str, minutes: float = 1000, **values: Any) -> int:
    chosen = plan(100_000_000, minutes, size=size, on_cpu=True, **values)
    return chosen.train.batch_size * chosen.context_length


def test_batch_grows_with_muons_share_of_a_step():
    tokens = [step_tokens(size) for size in ORDER[:5]]
    assert tokens == sorted(tokens)
    assert tokens[0] == 2048 < tokens[3] < tokens[4]
    largest = ORDER[4]
    assert step_tokens(largest, 3) == 2048  # enough steps matter more
    assert step_tokens(largest, overrides={"optimizer": "adamw"}) == 2048
    assert step_tokens(largest, train=TrainConfig(steps=1000)) == 2048
    few = plan(40_000, 1000, size=largest, on_cpu=True)
    assert few.train.batch_size * few.context_length <= 40_000 / 8
    # Ranks share the speed, and each has a batch as if it were alone.
    assert step_tokens(largest, n_ranks=2, flops_per_second=2e11) == 2 * step_tokens(largest)


def test_batch_follows_from_the_measured_share_of_muon():
    assert step_tokens("small", measured_step=MeasuredStep(2048, 0.5, 0.04)) == 2048
    assert step_tokens("small", measured_step=MeasuredStep(2048, 0.5, 0.06)) == 4096
    assert step_tokens("small", measured_step=MeasuredStep(4096, 1.0, 0.12)) == 8192
    slow = MeasuredStep(4096, 1.5, 0.2)  # 20 minutes have 430 steps of 8,192 tokens
    assert step_tokens("small", minutes=20, measured_step=slow) == 4096
    assert step_tokens("small", minutes=40, measured_step=slow) == 8192


def test_batch_fits_into_the_memory_of_a_gpu():
    def on_gpu(memory: int | None) -> Plan:
        return plan(10**8, size=ORDER[-1], on_cpu=False, rank_memory=memory)

    def needed(chosen: Plan) -> int:
        model, train, context = chosen.model, chosen.train, chosen.context_length
        return rank_memory(
            model, train, context=context, n_ranks=1, parallel="ddp", on_gpu=True
        ).total

    whole = on_gpu(None)
    assert whole.train.batch_size * whole.context_length == 16_384
    assert on_gpu(10**12) == whole
    smaller = on_gpu(needed(whole))  # a tenth is for the driver and fragments
    assert smaller.train.batch_size * smaller.context_length == 8192
    assert needed(smaller) < 0.9 * needed(whole)


def test_batch_fits_into_memory_in_the_precision_of_the_run():
    def step_tokens_in(precision: Precision, memory: int) -> int:
        return step_tokens(
            "small",
            measured_step=MeasuredStep(4096, 1.0, 0.12),
            rank_memory=memory,
            train=TrainConfig(minutes=1000, precision=precision),
        )

    memory = [n << 20 for n in range(100, 1000, 25)]
    few, many = ([step_tokens_in(p, n) for n in memory] for p in ("float32", "bfloat16"))
    assert few != many
    assert all(small <= large for small, large in zip(few, many, strict=True))


def test_plan_names_the_start_of_the_weights():
    def start(**values: Any) -> str:
        return {choice.name: choice.value for choice in plan(400_000, **values).choices}["start"]

    assert start() == "bigrams"
    assert start(family="gpt2") == start(overrides={"bigram_start": "false"}) == "random"


def test_new_models_have_a_head_of_their_own_where_the_family_allows_it():
    untied, tied = plan(400_000), plan(400_000, family="gpt2")
    assert not untied.model.tied_embeddings
    assert untied.train.bigram_start
    assert untied.train.embedding_learning_rate == 8 * untied.train.learning_rate
    assert tied.model.tied_embeddings
    assert not tied.train.bigram_start
    assert tied.train.embedding_learning_rate == tied.train.learning_rate
    assert plan(400_000, overrides={"tied_embeddings": "true"}).model.tied_embeddings
    with pytest.raises(UsageError, match="cannot start from bigrams"):
        plan(400_000, family="gpt2", overrides={"bigram_start": "true"})
    tuned = plan(400_000, start_from=untied.model)
    assert not tuned.train.bigram_start
    assert tuned.train.embedding_learning_rate == tuned.train.learning_rate


def test_logits_are_scaled_in_models_with_a_final_norm_that_is_trained():
    assert plan(400_000).train.temperature_scaling
    assert not plan(400_000, family="classic").train.temperature_scaling
    assert not plan(400_000, start_from=plan(400_000).model).train.temperature_scaling
    with pytest.raises(UsageError, match="temperature_scaling=true cannot be combined"):
        plan(400_000, family="classic", overrides={"temperature_scaling": "true"})


def test_many_epochs_give_a_larger_model():
    read_once, read_often = plan(100_000_000, 2), plan(150_000, 2)
    assert ORDER.index(read_often.size) == ORDER.index(read_once.size) + 1


def test_more_epochs_give_more_bpe_dropout():
    shares = [plan(150_000, m, has_merges=True).train.bpe_dropout for m in (0.03, 0.1, 2, 30)]
    assert shares == sorted(set(shares))
    assert shares[0] == 0
    assert plan(150_000, 30).train.bpe_dropout == 0  # characters
    decaying = [plan(150_000, m, has_merges=True).train.bpe_dropout_in_decay for m in (2, 60)]
    assert decaying == [False, True]


def test_many_epochs_compute_half_the_windows_twice():
    twice = plan(150_000, 60, has_merges=True)
    once = plan(150_000, 60, has_merges=True, overrides={"consistency": "0"})
    assert (twice.train.passes, once.train.passes) == (2, 1)
    assert twice.model == once.model
    assert 2 * twice.train.batch_size == once.train.batch_size
    assert 2 * twice.tokens_per_second == once.tokens_per_second
    memory = [activation_bytes(p.model, p.train, context=64, on_gpu=False) for p in (twice, once)]
    assert memory[0] == memory[1]
    choices = [{choice.name: choice for choice in p.choices} for p in (twice, once)]
    assert "R-Drop" in choices[0].keys() - choices[1].keys()
    assert choices[0]["steps"] == choices[1]["steps"]
    epochs = [float(one["dropout"].why.split()[-2].replace(",", "")) for one in choices]
    assert 2 * epochs[0] == pytest.approx(epochs[1], rel=0.05)
    overrides = {"batch_size": "8"}
    assert plan(150_000, 60, has_merges=True, overrides=overrides).train.passes == 1
    overrides = {"batch_size": "4", "consistency": "1", "dropout": "0.2"}
    given = plan(150_000, 60, has_merges=True, overrides=overrides)
    assert (given.train.passes, given.train.batch_size) == (2, 4)
    assert plan(150_000, 2, has_merges=True).train.passes == 1
    ranks = plan(150_000, 60, has_merges=True, n_ranks=3).train
    assert (ranks.passes, ranks.batch_size % 3) == (2, 0)


def test_model_config_round_trips_through_json():
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64
    )
    for more in ({}, {"rope_scaling": scaling}):
        config = ModelConfig.of("llama", vocab_size=300, **more)
        assert ModelConfig.from_dict(json.loads(json.dumps(asdict(config)))) == config


def test_user_settings_hold_and_are_marked():
    chosen = plan(400_000, overrides={"dropout": "0.35", "batch_size": "3", "n_layers": "1"})
    assert (chosen.train.dropout, chosen.train.batch_size, chosen.model.n_layers) == (0.35, 3, 1)
    reasons = {choice.name: choice.why for choice in chosen.choices}
    assert reasons["dropout"] == reasons["batch"] == "set by the user"
    assert reasons["learning rate"] != "set by the user"


@pytest.mark.parametrize(
    ("error", "overrides", "train_tokens"),
    [
        (CorpusError, {"context_length": "500"}, 400),
        (CorpusError, {}, 1),
        (UsageError, {"d_model": "100", "n_heads": "3"}, 400),
        (UsageError, {"accumulation": "5", "batch_size": "4"}, 400),
        (UsageError, {"accumulation": "0"}, 400),
        (UsageError, {"compile": "true"}, 400),  # has its own option
    ],
)
def test_contradictory_values_are_refused(error, overrides, train_tokens):
    with pytest.raises(error):
        plan(train_tokens, overrides=overrides)


def test_more_warmup_than_steps_is_refused():
    few = TrainConfig(steps=5)
    with pytest.raises(UsageError, match="fewer than the 5 steps"):
        plan(400, train=few, overrides={"warmup_steps": "5"})
    assert plan(400, train=few, overrides={"warmup_steps": "4"}).train.warmup_steps == 4


def test_field_with_an_option_names_the_option():
    with pytest.raises(UsageError, match="has its own option") as refused:
        plan(400, overrides={"val_fraction": "0.5"})
    assert "--val-fraction" in refused.value.hint


def test_plan_that_needs_too_much_memory_is_refused():
    crowd = {"batch_size": "20000"}
    with pytest.raises(UsageError, match=r"GB of memory with batch_size=20000, .* 8.0 GB is"):
        plan(10**6, overrides=crowd, memory=8 * 10**9)
    in_parts = plan(10**6, overrides=crowd | {"accumulation": "1000"}, memory=8 * 10**9)
    assert in_parts.train.batch_size == 20_000
    with pytest.raises(UsageError, match="d_model=32768"):
        plan(10**6, overrides={"d_model": "32768"}, memory=8 * 10**9)


@pytest.mark.parametrize("family", ["qwen3", "classic"])
def test_memory_estimate_matches_what_a_step_stores(family):
    shape = dict(n_layers=3, d_model=64, n_heads=2, context_length=64)
    model = ModelConfig.of(family, **shape, vocab_size=32)
    tokens, stored = torch.zeros(8, 64, dtype=torch.int64), {}

    def store(tensor: torch.Tensor) -> torch.Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
        Transformer(model, dropout=0.1).train().hidden_states(tokens)
    train = ResolvedTrainConfig(batch_size=8, dropout=0.1)
    estimate = rank_memory(model, train, context=64, n_ranks=1, parallel="ddp", on_gpu=False)
    assert 0.5 * estimate.total < sum(stored.values()) < estimate.total


def test_evaluation_fits_into_its_share_of_a_short_run():
    long, short = plan(10**8, 60), plan(10**8, 0.3, vocab_size=16_000)
    assert long.train.eval_tokens == ResolvedTrainConfig().eval_tokens
    assert short.train.eval_tokens < ResolvedTrainConfig().eval_tokens / 2
    assert (
        plan(10**8, train=TrainConfig(steps=3)).train.eval_tokens
        == ResolvedTrainConfig().eval_tokens
    )


def test_compiling_needs_minutes(tmp_path):
    short = request(tmp_path, train=TrainConfig(minutes=0.5), compile=True)
    with pytest.raises(UsageError, match="--compile cannot be combined with"):
        dry_run(short)


def test_dry_run_returns_the_plan_and_writes_nothing(tmp_path):
    shown = dry_run(request(tmp_path))
    assert list(tmp_path.iterdir()) == [tmp_path / "corpus.txt"]
    begun = start_run(request(tmp_path))
    assert (begun.n_parameters, begun.vocab_size) == (shown.n_parameters, shown.vocab_size)
    assert [c.name for c in begun.choices] == [c.name for c in shown.choices]
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "qwen3"}'
    )  # a model is there by now
    assert dry_run(request(tmp_path)).n_parameters == shown.n_parameters


@pytest.mark.parametrize(
    ("train_tokens", "why"),
    [
        (40_000_000, "at most 5% of the time"),
        (5_000, "3 epochs apart"),
        (400_000, "set by the user"),
    ],
)
def test_evaluations_are_as_far_apart_as_their_reason_says(train_tokens, why):
    overrides = {"eval_every": "30"} if why == "set by the user" else {}
    chosen = plan(train_tokens, overrides=overrides)
    [row] = [choice for choice in chosen.choices if choice.name == "evaluation"]
    assert row.why == why
    assert row.value == f"every {chosen.train.eval_every} steps"
    tokens = chosen.train.eval_every * chosen.train.batch_size * chosen.context_length
    evaluated = min(train_tokens // 9, chosen.train.eval_tokens)
    if why == "at most 5% of the time":  # a token costs a third of one in a step
        assert 0.045 < evaluated / 3 / tokens <= 0.05
    if why == "3 epochs apart":
        assert tokens / train_tokens == pytest.approx(3, rel=0.03)


def test_held_out_text_of_any_size_leaves_time_for_steps():
    step = MeasuredStep(2048, 0.05, 0.0)
    small, large = (
        plan(n, minutes=0.15, on_cpu=True, measured_step=step, setup_seconds=2.0)
        for n in (900_000, 90_000_000)
    )
    assert small.train.eval_tokens == large.train.eval_tokens
    assert small.closing_seconds == large.closing_seconds < 2.0
    evaluated = 2 * large.train.eval_tokens / large.tokens_per_second
    assert 0.02 * 9 < evaluated < 0.1 * 9
    assert plan(90_000_000, train=TrainConfig(steps=9)).evaluated_tokens is None
