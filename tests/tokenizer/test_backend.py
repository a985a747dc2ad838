"""With the merges of one text, the text gets the ids that it gets with all merges."""

import random
from pathlib import Path

import pytest

from tgen.checkpoint.gguf import tokenizer as gguf_tokenizer
from tgen.errors import TokenizerError
from tgen.tokenizer import Tokenizer, train_bpe
from tgen.tokenizer import backend as library
from tgen.tokenizer.tokenizer_json import SPACE

TEXT = Path(__file__).read_text() + "Ümlaut, e\u0301clair\n\t 12 dogs, 345 cats"
END, MARK = "<|endoftext|>", "<mark>"


@pytest.fixture(scope="module", params=["gpt-2", "qwen2", "llama-bpe"])
def fields(request):
    """A file's fields, with merges that do not fit and an added token that is no special one."""
    tokenizer = train_bpe([TEXT.encode()], vocab_size=600)
    fields = gguf_tokenizer.to_fields(
        tokenizer, tokenizer.vocab_size, ends=[tokenizer.end_of_text or 0]
    )
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    return fields | {
        "tokenizer.ggml.pre": request.param,
        "tokenizer.ggml.tokens": [*tokens, MARK, "theĠdogs"],
        "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], 4, 1],
        "tokenizer.ggml.merges": ["W ha", *merges, "d o g", "z", "th eĠdogs", merges[0]],
    }


def test_short_texts_have_the_ids_of_the_whole_tokenizer(fields, monkeypatch):
    monkeypatch.setattr("tgen.tokenizer.backend._MAX_TEXTS", 1 << 30)
    short, _ = gguf_tokenizer.read(fields)
    whole = Tokenizer(gguf_tokenizer.to_json(fields)[0])
    rng = random.Random(1)
    pieces = [
        END,
        MARK,
        " ",
        "the",
        "dog",
        "7",
        "é",
        "\ufffd",
        SPACE,
        "\n",
        *TEXT.split(),
        *"theuinaors",
    ]
    for _ in range(200):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 20)))
        assert short.encode(text.encode()) == whole.encode(text.encode())
        assert short.encode_with_special(text) == whole.encode_with_special(text)
    for data in (b"", b"\xff", b"the \xff dogs", b"a\xff" * 100):
        assert short.encode(data) == whole.encode(data)
    backend = whole._make_all().plain.at_start
    names = [backend.id_to_token(i) for i in range(whole.vocab_size)]
    assert [short.id_to_token(i) for i in range(whole.vocab_size)] == names


@pytest.mark.parametrize("n_short", [1, 9])
def test_long_and_many_texts_are_encoded_with_all_merges(fields, n_short):
    whole = Tokenizer(gguf_tokenizer.to_json(fields)[0])
    short, _ = gguf_tokenizer.read(fields)
    for i in range(n_short):
        assert short.encode(b"the dogs") == whole.encode(b"the dogs")
        assert (short._all is not None) == (i >= library._MAX_TEXTS)
    assert short.encode(b"the dogs. " * 200) == whole.encode(b"the dogs. " * 200)
    assert short._all is not None


@pytest.mark.parametrize("as_strings", [False, True])
def test_short_texts_of_a_file_have_the_ids_of_the_whole_tokenizer(fields, as_strings):
    content, _ = gguf_tokenizer.to_json(fields)
    if as_strings:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    short, whole = Tokenizer(content), Tokenizer(content)
    whole._make_all()
    for text in ("the dogs", f"a{END}b{MARK}", "", "é 12", "x" * 3000):
        assert short.encode(text.encode()) == whole.encode(text.encode())
        assert short.encode_with_special(text) == whole.encode_with_special(text)
    assert short._all is not None


@pytest.mark.parametrize("fault", ["merge", "added"])
def test_faults_of_a_file_are_found_at_once(fields, fault):
    content, _ = gguf_tokenizer.to_json(fields)
    vocab = content["model"]["vocab"]
    if fault == "merge":
        content["model"]["merges"] = [["the", "Ġdogs"], ["theĠ", "dogs"]]
    else:
        vocab[END], vocab[MARK] = vocab[MARK], vocab[END]
    with pytest.raises(TokenizerError):
        Tokenizer(content)
