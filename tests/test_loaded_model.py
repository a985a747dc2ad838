"""One model in several threads and streams: every text is what it is alone."""

import threading
from itertools import zip_longest
from typing import Any

import pytest

from tgen.checkpoint import model_dir
from tgen.config import EngineOptions
from tgen.engine.open_engine import open_engine
from tgen.loaded_model import LoadedModel
from tgen.python_api import Model

PROMPTS = ["What is", "The king", "my lord, the king said: what is a crown? " * 3, "", "日本 🦋"]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 5, "top_k": 0, "repetition_penalty": 1.2},
    {"seed": 1, "choices": ["king", "crown", "queen"]},
    {"seed": 2, "ban": ["a"], "bias": {"e": 2.0}},
]


@pytest.fixture(params=["kernels", "torch"])
def model(trained, request) -> Model:
    bundle = model_dir.load(trained)
    threads = 2 if request.param == "kernels" else 1  # torch's number would stay for other tests
    engine = open_engine(bundle, EngineOptions(device="cpu", threads=threads, kind=request.param))
    return Model(LoadedModel(bundle, engine))


def test_interleaved_streams_give_the_text_of_each_alone(model):
    streams = [
        {"prompt": prompt, "max_new_tokens": 16, **options}
        for prompt in PROMPTS
        for options in OPTIONS
    ]
    expected = [model.generate(**stream) for stream in streams]
    turns = zip_longest(*(model.stream(**stream) for stream in streams), fillvalue="")
    texts = ["".join(pieces) for pieces in zip(*turns, strict=True)]
    assert texts == expected


def test_other_calls_between_two_tokens_change_nothing(model):
    expected, score = model.generate("What is", max_new_tokens=40), model.score("The king")
    pieces = []
    for piece in model.stream("What is", max_new_tokens=40):
        pieces.append(piece)
        assert model.score("The king") == score
        model.cache_prompt("my lord")
        model.generate_batch(["The", "king"], max_new_tokens=2)
        next(model.stream("abandoned"), None)
    assert "".join(pieces) == expected


def test_the_logits_after_a_text_do_not_depend_on_the_texts_before(model):
    loaded = model._loaded
    ids = loaded.encode("What is the king")
    for text in (ids[:3], ids[:4], ids, ids, ids[:2], [*ids[:2], *ids], ids[:1]):
        fresh = loaded.engine.clone().extend([text])
        assert loaded.next_logits(text) == pytest.approx(fresh, abs=1e-5)


def test_texts_of_eight_threads_equal_each_text_alone(model):
    n_texts = 300 if model._loaded.engine.name == "kernels" else 60
    calls = [
        {"prompt": prompt, "max_new_tokens": 4, **options}
        for prompt in PROMPTS
        for options in OPTIONS
    ]
    expected = [model.generate(**call) for call in calls]
    wrong, failed = [], []
    done = []

    def work(thread: int) -> None:
        try:
            for i in range(thread, n_texts, 8):
                call = calls[i % len(calls)]
                text = model.generate(**call) if i % 3 else "".join(model.stream(**call))
                if text != expected[i % len(calls)]:
                    wrong.append((call, text))
                done.append(i)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert wrong == []
    assert sorted(done) == list(range(n_texts))


def test_threads_that_share_every_kind_of_call(model):
    """Scores, caches and batches beside streams, on a model that has computed nothing yet."""
    calls = [
        lambda: model.generate("The king", max_new_tokens=20),
        lambda: model.score("What is a crown?"),
        lambda: model.generate_batch(["a", "king " * 8, "What"], max_new_tokens=8),
        lambda: model.generate(
            "The king said", prompt_cache=model.cache_prompt("The king"), max_new_tokens=8
        ),
    ]
    results: dict[int, object] = {}

    def work(thread: int) -> None:
        for _ in range(5):
            results[thread] = calls[thread % 4]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [call() for call in calls]
    assert [results[i] for i in range(8)] == expected * 2
