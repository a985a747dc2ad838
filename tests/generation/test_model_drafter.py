"""Speculative decoding with a draft model: good drafts, a KV cache in step, and no harm."""

from dataclasses import replace

import numpy as np
import pytest

from support.models import cpu_engine, make_model
from tgen.checkpoint.model_lookup import shipped_model
from tgen.config import SamplingConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError, UsageError
from tgen.generation.loop import generate
from tgen.generation.model_drafter import ModelDrafter, _Text
from tgen.generation.vocabulary import Vocabulary
from tgen.python_api import load

PROMPTS = [[1, 2, 3], list(range(15)), [7], [1, 2, 9]]
SAMPLINGS = [
    SamplingConfig(temperature=0),
    SamplingConfig(temperature=1.3, top_k=0, seed=3),
    SamplingConfig(repetition_penalty=1.5, dry_multiplier=1, no_repeat_ngram=2, seed=4),
]


class WatchedEngine:
    """An engine that counts passes, and stores the tokens of all sequences and what starts a draft.

    In every third draft, its most likely token changes.
    """

    def __init__(self, engine, *, wrong=False):
        self._engine, self.wrong = engine, wrong
        self.passes = self.drafts = 0
        self.texts, self.starts = [[]], []
        self._draft_starts = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def extend(self, tokens, **how):
        self.passes += 1
        logits = self._engine.extend(tokens, **how)
        self.texts = [text + list(new) for text, new in zip(self.texts, tokens, strict=True)]
        if self._draft_starts:
            self.starts += self.texts
            self.drafts += 1
        self._draft_starts = False
        if self.wrong and self.drafts % 3 == 0:
            logits[np.arange(len(logits)), (logits.argmax(1) + 1) % 300] = 1e3
        return logits

    def rewind(self, lengths):
        self._engine.rewind(lengths)
        self.texts = [text[:n] for text, n in zip(self.texts, lengths, strict=True)]
        self._draft_starts = True

    def select(self, indices, lengths=None):
        self._engine.select(indices, lengths)
        lengths = lengths or [999] * len(indices)
        self.texts = [self.texts[i][:n] for i, n in zip(indices, lengths, strict=True)]
        self._draft_starts = True


def engine_of(family, *, seed=0, context_length=48, kernels=True):
    model = make_model(family, seed=seed, context_length=context_length)
    return (
        cpu_engine(model.config, model.to_arrays(), n_threads=1) if kernels else TorchEngine(model)
    )


def run(engine, draft_engine, sampling=SAMPLINGS[1], *, prompts=PROMPTS, n=30, stop=()):
    """Return the tokens of each prompt with a draft model, or None, and the drafter."""
    out = [[] for _ in prompts]
    drafts = None
    if draft_engine is not None:
        drafts = ModelDrafter(draft_engine, Vocabulary(ends=stop), relative_cost=0.05)
    sampling = replace(sampling, max_new_tokens=n)
    for token in generate(engine, prompts, sampling=sampling, stop=stop, drafts=drafts):
        out[token.sequence].append(token.id)
    return out, drafts


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_a_model_that_drafts_for_itself_is_always_right(sampling, prompts):
    engine = WatchedEngine(engine_of("qwen3"))
    plain, _ = run(engine, None, sampling, prompts=prompts)
    passes, engine.passes = engine.passes, 0
    ids, drafts = run(engine, engine.clone(), sampling, prompts=prompts)
    assert ids == plain
    assert engine.passes < passes / 2
    # After the last draft, nothing was learned.
    assert all(text.n_accepted - text.n_tried == 2 * 0.7 - 2 for text in drafts._texts.values())


@pytest.mark.parametrize("kernels", [True, False])
def test_cache_of_the_draft_model_has_the_text_alone(kernels):
    engine = engine_of("llama", kernels=kernels)
    draft_engine = WatchedEngine(engine_of("llama", kernels=kernels), wrong=True)
    plain, _ = run(engine, None)
    assert run(engine, draft_engine)[0] == plain
    texts = [prompt + new for prompt, new in zip(PROMPTS, plain, strict=True)]
    assert len(draft_engine.starts) > 20
    for start in draft_engine.starts:
        assert any(start == text[: len(start)] for text in texts)


def test_only_draft_tokens_that_were_right_stay_cached():
    for draft, n_cached, n_tried, n_accepted in (
        ([5, 6, 7], 4, 2, 1),
        ([5, 9, 7], 5, 2, 2),
        ([5], 3, 1, 1),
        ([4, 9], 3, 1, 0),
        ([], 3, 0, 0),
    ):
        text = _Text(n_read=3, n_cached=3, draft=draft, n_tried=0, n_accepted=0)
        text.learn([1, 2, 3, 5, 9])
        assert (text.n_cached, text.n_tried, text.n_accepted) == (n_cached, n_tried, n_accepted)


def test_text_goes_on_past_both_contexts():
    engine, longest = engine_of("llama"), 0
    plain, _ = run(engine, None, n=150)
    for context_length in (16, 48, 100):
        draft_engine = WatchedEngine(engine_of("llama", context_length=context_length))
        assert run(engine, draft_engine, n=150)[0] == plain
        longest = max(map(len, draft_engine.starts))
        assert longest <= min(context_length, 48)
        assert longest > min(context_length, 48) - 16


def test_a_model_that_is_never_right_soon_drafts_no_more():
    engine, other = engine_of("llama"), WatchedEngine(engine_of("llama", seed=1))
    plain, _ = run(engine, None, prompts=[[1, 2]], n=200)
    assert run(engine, other, prompts=[[1, 2]], n=200)[0] == plain
    assert 5 < other.drafts < 30
    assert run(engine, other, prompts=[[1]] * 40, n=5)[1]._slots == []  # a full pass gets no drafts


@pytest.mark.parametrize("method", ["extend", "check_room"])
def test_a_draft_model_that_fails_changes_nothing(method, monkeypatch):
    engine, draft_engine = engine_of("llama"), engine_of("llama")
    plain, _ = run(engine, None)
    original, calls = getattr(draft_engine, method), []

    def refuse(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3 or method == "check_room":
            raise ModelError("no memory")
        return original(*arguments, **options)

    monkeypatch.setattr(draft_engine, method, refuse)
    assert run(engine, draft_engine)[0] == plain
    assert draft_engine.cache_bytes == 0


def test_a_text_whose_drafts_fail_gets_none(monkeypatch):
    engine, draft_engine = engine_of("llama"), engine_of("llama")
    prompts = [[1, 2, 3], list(range(30))]
    plain, _ = run(engine, None, prompts=prompts)
    extend = draft_engine.extend

    def damage_second(tokens):
        logits = extend(tokens)
        logits[1:2] = np.nan
        return logits

    monkeypatch.setattr(draft_engine, "extend", damage_second)
    ids, drafts = run(engine, draft_engine, prompts=prompts)
    assert ids == plain
    assert not drafts._failed


def test_drafts_end_with_the_text():
    engine = engine_of("llama")
    plain, _ = run(engine, None)
    stop = {plain[0][9], plain[1][13]}
    ends, _ = run(engine, None, stop=stop)
    assert len(ends[0]) < 30
    assert run(engine, engine.clone(), stop=stop)[0] == ends
    assert run(engine, engine.clone(), n=3)[0] == [ids[:3] for ids in plain]
    for i in range(4, 12):
        draft_engine = WatchedEngine(engine.clone())
        [ids], _ = run(engine, draft_engine, prompts=PROMPTS[:1], stop={plain[0][i]})
        assert len(draft_engine.texts[0]) < len(PROMPTS[0]) + len(ids)


def test_commands_and_python_write_the_same_text_with_a_draft_model(trained, draft_model, run_here):
    options = ["-m", trained, "-p", "What is", "-n", 12, "--seed", 1, "-q"]
    plain = run_here("generate", *options)
    drafted = run_here("generate", *options, "--draft-model", draft_model)
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    model = load(trained, threads=1, draft_model=draft_model)
    assert model._loaded._draft_model is not None
    pieces, others = (model.stream("What is", max_new_tokens=12, seed=1) for _ in range(2))
    assert [*zip(pieces, others, strict=True)]
    expected = load(trained, threads=1).generate("What is", max_new_tokens=12, seed=1)
    assert model.generate("What is", max_new_tokens=12, seed=1) == expected


def test_a_draft_model_that_is_not_smaller_is_refused(trained, draft_model, run_here):
    for model, draft in ((trained, trained), (draft_model, trained)):
        result = run_here("generate", "-m", model, "-p", "What is", "--draft-model", draft)
        assert (result.returncode, result.stdout) == (2, b"")
        assert f"error: --draft-model {draft}: is not smaller than {model} (got " in (
            result.stderr.decode()
        )
        assert result.stderr.endswith(b"\nhint: name a smaller model with the same tokenizer\n")


def test_a_draft_model_with_other_tokens_is_refused(trained, tmp_path, run_here):
    with pytest.raises(UsageError, match=r"draft_model=.*its tokens are not those of") as caught:
        load(trained, threads=1, draft_model=shipped_model())
    assert caught.value.hint == "name a smaller model with the same tokenizer"
    options = ["-m", trained, "-p", "What is", "--draft-model", shipped_model()]
    for more, words in (
        ((), b"--draft-model "),
        (("--draft", "off"), b"--draft-model cannot be combined with --draft off"),
        (("--no-kv-cache",), b"--draft-model cannot be combined with --no-kv-cache"),
        (("--draft-model", "nope"), b"--draft-model: model 'nope' does not exist"),
        (("--draft-model", tmp_path), b"--draft-model: "),
    ):
        result = run_here("generate", *options, *more)
        assert result.returncode in (1, 2)
        assert words in result.stderr
        assert result.stdout == b""
