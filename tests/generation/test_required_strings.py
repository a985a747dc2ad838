"""Required strings are written in time, between words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgen.config import SamplingConfig
from tgen.errors import UsageError
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.required_strings import missing_strings
from tgen.generation.sequence import Request, SequenceState, check_request
from tgen.generation.vocabulary import Vocabulary
from tgen.generation.words import find_borders
from tgen.python_api import load


def test_required_string_inside_another_is_not_added():
    assert missing_strings([b"a, b c", b"b", b"x", b"x"], b"") == [b"a, b c", b"x"]
    assert missing_strings([b"heart", b"art"], b"") == [b"heart", b"art"]  # not that word
    assert missing_strings([b"+-*/", b"-*"], b"..-*") == [b"+-*/"]
    assert missing_strings([b"+-*/", b"-*"], b"+-*/") == []
    assert missing_strings([b"art"], b"hearts arts") == [b"art"]
    assert missing_strings([b"art"], b"an art") == []
    assert missing_strings([b"art"], b"an art", certain=True) == [b"art"]  # or an artist
    assert missing_strings([b"art"], b"an art", 4) == [b"art"]
    with pytest.raises(UsageError, match="require"):
        SamplingConfig(require=["a word"], ban=["wor"])


def write(sampling, n, *, before=b"", preferred=b"", tokens):
    """Write `n` tokens, each the most likely one, which starts with `preferred`."""
    vocabulary = Vocabulary(
        tokens, [0], lambda data: [tokens.index(data[i : i + 1]) for i in range(len(data))]
    )
    processors = LogitsProcessors(sampling, vocabulary)
    state, text, ids = processors.new_text(before), b"", [1]
    for i in range(n):
        logits = np.array([token.startswith(preferred) for token in tokens], np.float32)
        processors.apply(logits, ids, 1, text, n - i, state)
        ids.append(int(logits.argmax()))
        text += tokens[ids[-1]]
    return text


def test_required_words_are_written_between_words():
    tokens = [b"", *(bytes([i]) for i in b"abcx .,\n-")]
    options = dict(tokens=tokens, preferred=b"x", before=b"x")
    require = SamplingConfig(require=["ab"], max_new_tokens=9)
    assert write(require, 9, **options) == b"xxxxxx ab"
    assert write(require, 3, **options) == b" ab"
    assert write(SamplingConfig(require=["ab", "ca"]), 9, **options) == b"xxx ab ca"
    assert write(SamplingConfig(require=["ab"], ban=["x a"]), 9, **options) == b"xxxxxx\nab"
    after_space = options | {"before": b"x "}
    assert write(SamplingConfig(require=["ab"], ban=[" a"]), 3, **after_space) == b"\nab"
    assert write(SamplingConfig(require=[".ab"]), 9, **options) == b"xxxxxx.ab"
    options["before"] = b"x "
    assert write(require, 2, **options) == b"ab"
    assert write(require, 3, **options) == b"ab"  # and the end, since the word must not grow
    # A little earlier where the text would end the word with a space.
    options |= {"preferred": b" ", "before": b"x"}
    assert write(SamplingConfig(require=["ab"]), 20, **options) == b"     ab             "
    assert write(require, 9, **options) == b"    ab   "
    options |= {"preferred": b"."}
    assert write(require, 9, **options) == b"...... ab"
    assert write(SamplingConfig(require=[".ab"]), 9, **options) == b".......ab"
    with_words = SamplingConfig(require=["ab"], words="x", max_new_tokens=9)
    assert write(with_words, 9, **options) == b".... ab.."


LETTERS = ["a", "b", "é", " ", ",", ".", "-", "\n", "'", "日"]
WORD = st.text("abé'", min_size=1, max_size=5)
STRING = st.one_of(WORD, WORD.map(", {}".format), WORD.map("{}.".format), WORD.map("a {}".format))


@given(
    prompt=st.text(LETTERS, min_size=1, max_size=6),
    more=st.lists(st.text(LETTERS, min_size=2, max_size=4).map(str.encode), max_size=20),
    strings=st.lists(STRING, min_size=1, max_size=3),
    words=st.none() | st.lists(WORD, min_size=1, max_size=8).map(" ".join),
    stop=st.sampled_from([(), ("b b",), (" a",), ("..",)]),
    n=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_required_strings_are_always_written(prompt, more, strings, words, stop, n, seed):
    tokens = [b"", *sorted({bytes([i]) for text in LETTERS for i in text.encode()}), *more]

    def encode(data):
        ids = []
        while data:
            longest = max((one for one in tokens if one and data.startswith(one)), key=len)
            ids.append(tokens.index(longest))
            data = data[len(longest) :]
        return ids

    vocabulary = Vocabulary(tokens, [0], encode)
    try:
        sampling = SamplingConfig(require=strings, max_new_tokens=n, words=words, stop=stop)
        request = Request(encode(prompt.encode()), sampling)
        check_request(request, vocabulary, 1000)
    except UsageError:  # for example, there is too little room
        return
    processors = LogitsProcessors(sampling, vocabulary)
    state, text, finish = SequenceState(0, request, vocabulary, processors, 1000), b"", None
    random = np.random.default_rng(seed)
    while finish is None:
        logits = random.normal(size=len(tokens)).astype(np.float32)
        state.process_logits(logits)
        token = int(logits.argmax())
        _, finish = state.append(token)
        text += tokens[token]
    if state.complete:
        required = [one.encode() for one in strings]
        whole, n_prompt = prompt.encode() + text, len(prompt.encode())
        assert missing_strings(required, whole, n_prompt) == []


def test_required_words_have_borders_whatever_the_model_writes(trained):
    model, n = load(trained), 0
    for prompt in ("The ki", "What is", "zzz ", "The king said:\n", "na"):
        for seed, strings in enumerate([["crown"], ["art", "heart"], ["a crown", "king"]] * 6):
            texts = [*map(str.encode, strings)]
            for max_new_tokens in (len(model.encode(" ".join(["", *strings]))) + 3, 40):
                text = model.generate(
                    prompt,
                    seed=seed,
                    require=strings,
                    max_new_tokens=max_new_tokens,
                    temperature=1.5,
                )
                whole = (prompt + text).encode()
                for one in texts:
                    assert any(True for _ in find_borders(one, whole, len(prompt.encode()))), text
                    n += 1
    assert n > 200
