"""A sequence that fails or is cancelled leaves the batch, and the others stay the same."""

from dataclasses import replace

import numpy as np
import pytest

from support.models import cpu_engine, make_model
from tgen.config import SamplingConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError, UsageError
from tgen.generation.loop import generate_requests, make_source
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.sequence import Request
from tgen.generation.vocabulary import Vocabulary
from tgen.machine import memory

TOKENS = [bytes([i]) for i in range(256)] + [b"ab", b"bc"] * 22
SOME = SamplingConfig(max_new_tokens=16, top_k=0, repetition_penalty=1.1)
LATE = replace(SOME, regex="(a{0,1000}){0,1000}", max_new_tokens=400)  # fails after 100 tokens
STUCK = replace(SOME, ban=[bytes([i]) for i in range(256)])
REQUESTS = [Request([1, 2, 3 + i % 3], replace(SOME, seed=i)) for i in range(6)]


@pytest.fixture(params=["kernels", "torch"])
def engine(request):
    model = make_model("llama")
    if request.param == "torch":
        return TorchEngine(model)
    return cpu_engine(model.config, model.to_arrays(), n_threads=1)


def run(engine, requests, *, batch_size=4, ends=(), drafts=False, **options):
    """Return the (id, text, finish) of each request's tokens, and the errors."""
    out, errors = [[] for _ in requests], {}

    def on_error(number, error):
        assert number not in errors
        errors[number] = error

    for token in generate_requests(
        engine,
        make_source(requests),
        batch_size=batch_size,
        vocabulary=Vocabulary(TOKENS, ends=ends, encode=list),
        drafts=NgramDrafter() if drafts else None,
        on_error=on_error,
        **options,
    ):
        assert token.sequence not in errors
        out[token.sequence].append((token.id, token.text, token.finish))
    return out, errors


def at(requests, place, other):
    return [*requests[:place], other, *requests[place:]]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (LATE, "regex: lexer error: too many expressions"),
        (STUCK, "no token is allowed"),
        (replace(SOME, json_schema='{"$ref":"#"}'), "json_schema: no text matches"),
        (replace(SOME, regex="("), "regex"),
    ],
)
def test_failing_sequence_ends_alone_with_its_reason(engine, bad, words, drafts):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    for place in (0, 2, 6) if bad is not LATE else (2,):  # which takes long to fail
        requests = at(REQUESTS, place, Request([1, 2, 3], bad))
        out, errors = run(engine, requests, drafts=drafts)
        assert list(errors) == [place]
        assert isinstance(errors[place], UsageError)
        assert words in errors[place].message
        assert all(finish is None for _, _, finish in out.pop(place))
        assert out == alone


def test_any_exception_of_a_sequence_ends_it_alone(engine, monkeypatch):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    requests = at(REQUESTS, 1, Request([], SOME))  # a ValueError at its start
    out, errors = run(engine, requests)
    assert isinstance(errors[1], ValueError)
    assert [out[0], *out[2:]] == alone

    from tgen.generation.sequence import SequenceState

    append = SequenceState.append

    def failing_append(self, token):
        if self.number == 3 and len(self.tokens) > 9:
            raise KeyError("3")
        return append(self, token)

    monkeypatch.setattr(SequenceState, "append", failing_append)
    out, errors = run(engine, REQUESTS)
    assert isinstance(errors[3], KeyError)
    assert (out[3], alone[3][:7]) == (alone[3][:7], out[3])
    assert out[:3] + out[4:] == alone[:3] + alone[4:]


def test_logits_that_are_not_finite_end_their_sequence_alone(engine, monkeypatch):
    extend = engine.extend

    def damaged_extend(tokens, **options):
        logits = extend(tokens, **options)
        if len(tokens) == 4:
            logits = logits.copy()
            logits[2] = np.nan
        return logits

    monkeypatch.setattr(engine, "extend", damaged_extend)
    same = [Request([4 + i], replace(SOME, seed=i, temperature=0)) for i in range(4)]
    _, errors = run(engine, same)
    assert 2 in errors
    assert 0 not in errors


def test_without_a_handler_the_error_is_raised(engine):
    requests = make_source(at(REQUESTS, 2, Request([1], LATE)))
    vocabulary = Vocabulary(TOKENS)
    with pytest.raises(UsageError, match="too many expressions"):
        list(generate_requests(engine, requests, batch_size=9, vocabulary=vocabulary))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("batch_size", [2, 4, 9])
def test_cancelled_sequences_end_and_the_others_are_the_same(engine, batch_size, drafts):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    passes = [0]

    def cancelled():
        passes[0] += 1
        return {5: {0, 99}, 8: {1, 0}, 9: [3], 10: [3]}.get(passes[0], ())

    out, errors = run(engine, REQUESTS, batch_size=batch_size, drafts=drafts, cancelled=cancelled)
    assert not errors
    for number, tokens in enumerate(out):
        if number in (0, 1, 3):
            assert tokens == alone[number][: len(tokens)]
        else:
            assert tokens == alone[number]
    assert len(out[0]) < 16
    assert (len(out[0]) == 4) >= (not drafts)


def test_all_sequences_may_be_cancelled(engine):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    passes = [0]

    def cancelled():
        passes[0] += 1
        return {3: [0, 1]}.get(passes[0], ())

    out, _ = run(engine, REQUESTS, batch_size=2, cancelled=cancelled)
    assert out[:2] == [tokens[:2] for tokens in alone[:2]]
    assert out[2:] == alone[2:]


def test_texts_wait_until_the_memory_has_room_for_all_they_may_become(engine, monkeypatch):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    cache, used, extend = engine._cache, [], type(engine).extend
    is_torch = engine.name == "torch"  # which gives all sequences the same storage
    room = 100 if is_torch else 40  # tokens; two texts of 19

    def n_used():
        return cache.n_stored * cache.capacity if is_torch else sum(cache.lengths)

    def watch(self, tokens, **options):
        logits = extend(self, tokens, **options)
        used.append(n_used())
        return logits

    monkeypatch.setattr(memory, "_SMALL_CACHE", 1)
    monkeypatch.setattr(memory, "free_ram", lambda: (room - n_used()) * cache._bytes_per_token)
    monkeypatch.setattr(type(engine), "extend", watch)
    requests = at(REQUESTS, 3, Request([1, 2, 3], replace(SOME, max_new_tokens=45)))
    out, errors = run(engine, requests)
    if not is_torch:
        assert "the KV cache of 48 tokens needs" in errors.pop(3).message
    assert not errors
    assert [*out[:3], *out[4:]] == alone
    assert room // 2 < max(used) <= room


def test_a_text_asks_for_memory_again_only_when_another_has_ended(engine, monkeypatch):
    original, calls = type(engine).check_room, []

    def refuse_two(self, lengths):
        calls.append(len(lengths))
        if len(lengths) > 1:
            raise ModelError("no memory")
        return original(self, lengths)

    monkeypatch.setattr(type(engine), "check_room", refuse_two)
    out, errors = run(engine, REQUESTS)
    assert not errors
    assert out == run(engine, REQUESTS, batch_size=1)[0]
    n = len(REQUESTS)
    assert calls[: 2 * n - 1] == [1, *[2, 1] * (n - 1)]


def test_texts_follow_those_for_which_the_memory_was_refused(engine, monkeypatch):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    original, calls = type(engine).select, []

    def refuse_first(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) <= 2:
            raise ModelError("no memory")
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(engine), "select", refuse_first)
    out, errors = run(engine, REQUESTS, batch_size=1)
    assert [*errors] == [0, 1]
    assert out[2:] == alone[2:]


@pytest.mark.parametrize("method", ["select", "extend"])
def test_memory_that_is_refused_ends_the_newest_text_alone(engine, monkeypatch, method):
    alone, _ = run(engine, REQUESTS, batch_size=1)
    original, calls = getattr(type(engine), method), []

    def refuse_once(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise ModelError("no memory")
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(engine), method, refuse_once)
    out, errors = run(engine, REQUESTS)
    [number] = errors
    assert errors[number].message == "no memory"
    assert [text for i, text in enumerate(out) if i != number] == [
        text for i, text in enumerate(alone) if i != number
    ]
