"""Parsing of field=value settings."""

import pytest

from tgen.config import SIZES, ModelConfig
from tgen.config.training import TrainConfig
from tgen.errors import UsageError
from tgen.planning.model_size import PlanInputs
from tgen.planning.plan import make_plan
from tgen.runs.overrides import parse_overrides


def test_overrides_set_every_field_and_refuse_the_rest():
    def plan(**overrides: str):
        model_fields, train_fields = parse_overrides(overrides)
        return make_plan(
            family="llama",
            size="tiny",
            train=TrainConfig(**train_fields),
            model_fields=model_fields,
            inputs=PlanInputs(
                vocab_size=300,
                train_tokens=10_000,
                val_tokens=1000,
                has_merges=False,
                flops_per_second=1e10,
            ),
        )

    chosen = plan(
        n_kv_heads="2", tied_embeddings="false", beta2="0.9", warmup_steps="7", norm_eps="1e-4"
    )
    assert chosen.model.n_kv_heads == 2
    assert chosen.model.tied_embeddings is False
    assert (chosen.train.beta2, chosen.train.warmup_steps) == (0.9, 7)
    for name, value in [
        ("layers", "3"),
        ("n_layers", "many"),
        ("n_layers", "-1"),
        ("tied_embeddings", "maybe"),
        ("activation", "tanh"),
        ("activation", "relu"),
        ("learning_rate", "nan"),
        ("vocab_size", "9"),
        ("steps", "7"),
        ("rope_scaling", "linear"),
    ]:
        with pytest.raises(UsageError):
            plan(**{name: value})


def test_values_get_the_type_of_their_field():
    text = {"sliding_window": "8", "eval_every": "5", "bpe_dropout_in_decay": "true"}
    assert parse_overrides(text) == (
        {"sliding_window": 8},
        {"eval_every": 5, "bpe_dropout_in_decay": True},
    )


@pytest.mark.parametrize("name", ["n_layer", "N_LAYERS"])
def test_misspelled_field_gets_a_suggestion(name):
    with pytest.raises(UsageError, match=f"--set {name}: unknown field") as error:
        parse_overrides({name: "2"})
    assert error.value.hint == "did you mean n_layers?"


@pytest.mark.parametrize(
    ("d_model", "message"),
    [
        (999_999_996, "d_model: invalid value 999999996"),
        (102, "d_model=102 does not divide into n_heads=4 heads of an even size"),
        (100, "d_model=100 does not divide into n_heads=4 heads of an even size"),
    ],
)
def test_error_of_a_width_names_the_width(d_model, message):
    with pytest.raises(UsageError) as error:
        ModelConfig.of("qwen3", **SIZES["tiny"] | {"d_model": d_model}, vocab_size=300)
    assert error.value.message == message


@pytest.mark.parametrize("name", ["sliding_layers", "rope_layers", "rope_scaling"])
def test_fields_of_model_files_cannot_be_set(name):
    with pytest.raises(UsageError, match=f"--set {name}: this field comes from model files only"):
        parse_overrides({name: "1"})
