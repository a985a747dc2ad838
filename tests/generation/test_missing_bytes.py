"""A model like SmolLM2, whose vocabulary lacks 21 bytes: prompts, strings, constraints, streams."""

import numpy as np
import pytest

from support.models import TEXT, make_model
from support.vocabularies import SMOLLM2_MISSING, smollm2_like
from tgen.checkpoint import model_dir
from tgen.config import EngineOptions, SamplingConfig
from tgen.errors import UsageError
from tgen.generation.vocabulary import Vocabulary
from tgen.loaded_model import LoadedModel, open_model
from tgen.python_api import Model
from tgen.tokenizer import train_bpe

EXPRESSIBLE = "(?s:[^\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff])*"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    tokenizer = smollm2_like(train_bpe([TEXT], vocab_size=330))
    path = tmp_path_factory.mktemp("model")
    # Models round up the number of rows: these 40 have no tokens.
    random = make_model("llama", vocab_size=tokenizer.vocab_size + 40)
    model_dir.save(path, random.config, tokenizer, random.to_arrays())
    return open_model(path, EngineOptions(device="cpu"))


def generate(model, prompt="The king", n=40, **options):
    sampling = SamplingConfig(max_new_tokens=n, temperature=1.0, **options)
    pieces = model.pieces(model.tokens([model.encode(prompt)], sampling=sampling))
    return b"".join(piece for _, piece in pieces)


@pytest.mark.parametrize("prompt", [b"a\x04", "a\U00040000".encode(), b"a\xff"])
def test_prompt_with_a_missing_byte_is_an_error(model, prompt):
    with pytest.raises(UsageError, match="byte 1 of the text is 0x"):
        model.encode(prompt)
    with pytest.raises(UsageError, match="cannot express"):
        Model(model).score(prompt)


def test_tokens_past_the_vocabulary_are_never_sampled(model):
    n_tokens = model.tokenizer.vocab_size
    assert model.bundle.config.vocab_size == n_tokens + 40
    sampling = SamplingConfig(max_new_tokens=40, temperature=3.0, top_k=0, logprobs=5)
    tokens = list(model.tokens([model.encode("The king")] * 4, sampling=sampling))
    ids = {i for token in tokens for i in (token.id, *(top for top, _ in token.top_logprobs))}
    assert max(ids) < n_tokens
    logits = np.ones((2, n_tokens + 40), np.float32)
    masked = model.vocabulary.only_tokens(logits)
    assert np.isinf(masked[:, n_tokens:]).all()
    assert (masked[:, :n_tokens] == 1).all()
    gap = Vocabulary([b"a", b"", b"c"], ends=[1, 4], unused=[1, 2])
    assert np.isinf(gap.only_tokens(np.ones((1, 6), np.float32))).tolist() == [
        [False, False, True, True, False, True]
    ]
    assert np.isfinite(Vocabulary(ends=[1]).only_tokens(np.ones((1, 6), np.float32))).all()


def test_streamed_pieces_are_the_text_of_the_tokens(model):
    sampling = SamplingConfig(max_new_tokens=60, temperature=2.0)
    pieces = list(model.pieces(model.tokens([model.encode("é 🦋")], sampling=sampling)))
    text = model.tokenizer.decode([token.id for token, _ in pieces], continuation=True)
    assert b"".join(piece for _, piece in pieces) == text
    assert not set(text) & set(SMOLLM2_MISSING)


@pytest.mark.parametrize("option", ["stop", "ban"])
def test_stop_and_banned_strings_with_a_missing_byte_never_match(model, option):
    assert generate(model, **{option: ["\x04", "e\x04", b"\xff"]}) == generate(model)


def test_required_string_with_a_missing_byte_is_an_error(model):
    with pytest.raises(UsageError, match="require: byte 1 of the text is 0x04") as caught:
        generate(model, require=["a\x04"])
    assert caught.value.field == "require"


def test_choice_with_a_missing_byte_is_an_error(model):
    with pytest.raises(UsageError, match=r"^choices: 'a\\x04b': byte 1") as caught:
        generate(model, choices=["yes", "a\x04b"])
    assert caught.value.field == "choices"
    assert generate(model, choices=["yes", "no"]) in (b"yes", b"no")


def test_regular_expression_matches_only_texts_without_missing_bytes(model):
    assert generate(model, regex="a\x04b|ac/d", bias={"a": 9.0}) == b"ac/d"
    assert generate(model, regex="(\x13|\x14|q){3}") == b"qqq"
    for pattern in ("a\x04b", "[\U00040000-\U00050000]"):
        with pytest.raises(UsageError, match="regex: no text matches"):
            generate(model, regex=pattern)
    for seed in range(5):
        text = generate(model, regex="(?s:.){8}", seed=seed).decode()
        assert len(text) == 8


def test_schema_with_a_missing_byte_is_an_error_or_escapes_it(model):
    assert generate(model, json_schema='{"const": "a\\u0004b"}') == b'"a\\u0004b"'
    with pytest.raises(UsageError, match="json_schema: no text matches"):
        generate(model, json_schema='{"const": "\\ud8c0\\udc00"}')
