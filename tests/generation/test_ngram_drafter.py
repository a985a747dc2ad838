"""Speculative decoding: the same text in fewer passes; n-gram tables match the corpus."""

import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from support.models import DIFFERENT_POSITIONS, TEXT, cpu_engine, make_model
from tgen.checkpoint import model_dir
from tgen.config import SamplingConfig
from tgen.corpus import ngram_tables
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import ModelError
from tgen.generation.loop import generate
from tgen.generation.ngram_drafter import NgramDrafter, NgramTable

GREEDY = SamplingConfig(temperature=0)
PROMPTS = [[1, 2, 3], list(range(15)), [7], [1, 2, 9]]


class CountingEngine:
    """An engine that counts its passes."""

    def __init__(self, engine):
        self._engine, self.passes = engine, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def extend(self, tokens, **how):
        self.passes += 1
        return self._engine.extend(tokens, **how)


def run(engine, prompts, n, *, drafts=None, sampling=GREEDY, stop=()):
    engine.passes = 0
    out = [[] for _ in prompts]
    reports = [[] for _ in prompts]
    sampling = replace(sampling, max_new_tokens=n)
    for token in generate(engine, prompts, sampling=sampling, stop=stop, drafts=drafts):
        out[token.sequence].append(token.id)
        reports[token.sequence].append((token.logprob, token.entropy, token.rank, token.last))
    return out, reports


def tables_of(texts):
    twice = np.array([*texts, *texts], np.uint16).reshape(-1)  # n-grams that occur once are dropped
    return [NgramTable(rows, 300) for rows in ngram_tables(twice, max_bytes=1 << 20).values()]


@pytest.mark.parametrize(
    ("family", "sampling"),
    [(family, GREEDY) for family in DIFFERENT_POSITIONS]
    + [("qwen3", SamplingConfig(temperature=0.3, seed=3)), ("gpt2", SamplingConfig(seed=4))],
)
@pytest.mark.parametrize("on_kernels", [True, False])
def test_drafts_do_not_change_the_text_even_past_the_context(family, sampling, on_kernels):
    model = make_model(family, context_length=24)
    if on_kernels:
        engine = CountingEngine(cpu_engine(model.config, model.to_arrays(), n_threads=2))
    else:
        engine = CountingEngine(TorchEngine(model.double()))
    plain, reports = run(engine, PROMPTS, 60, sampling=sampling)
    passes = engine.passes
    # Tables of the text to be generated: nearly every draft is accepted.
    for tables in (tables_of(plain), []):
        drafts = NgramDrafter(tables)
        ids, draft_reports = run(engine, PROMPTS, 60, sampling=sampling, drafts=drafts)
        assert ids == plain
        if on_kernels:
            assert draft_reports == reports  # bit for bit
        if tables:
            assert engine.passes < passes
    stop = {plain[0][25], plain[1][35]}
    cut, _ = run(engine, PROMPTS, 60, sampling=sampling, stop=stop)
    drafts = NgramDrafter(tables_of(plain))
    assert run(engine, PROMPTS, 60, sampling=sampling, stop=stop, drafts=drafts)[0] == cut
    for n in (1, 2, 3, 5):
        drafts = NgramDrafter(tables_of(plain))
        ends = [row[:n] for row in plain]
        assert run(engine, PROMPTS, n, sampling=sampling, drafts=drafts)[0] == ends


def test_repetitive_text_needs_few_passes_and_random_text_gets_no_drafts():
    drafts = NgramDrafter()
    text, passes = [5, 6, 7, 8, 9], 0
    while len(text) < 400:
        draft = drafts.propose(0, text, batch_size=1, limit=400)
        full = [5, 6, 7, 8, 9] * 200
        n_accepted = next(i for i, token in enumerate([*draft, -1]) if token != full[len(text) + i])
        text += full[len(text) : len(text) + n_accepted + 1]
        passes += 1
    assert passes < 40
    drafts = NgramDrafter()
    # Every context has occurred before.
    text = np.random.default_rng(0).integers(0, 4, 2000).tolist()
    n_drafted = [len(drafts.propose(0, text[:n], batch_size=2, limit=400)) for n in range(1, 2000)]
    assert sum(n_drafted[1000:]) == 0


def test_searches_that_cost_more_than_they_save_are_rare_until_the_text_repeats_itself():
    drafts = NgramDrafter(search_cost=0.1)
    text = np.random.default_rng(0).integers(0, 50, 1000).tolist()
    searches = 0
    for n in range(1, 1000):
        drafts.propose(0, text[:n], batch_size=1, limit=400)
        searches += drafts._indexes[0].n_read == n
    assert searches < 200
    passes, full = 0, [*text, *text]
    while len(text) < 2000:
        draft = drafts.propose(0, text, batch_size=1, limit=1999 - len(text))
        assert draft == full[len(text) : len(text) + len(draft)]
        text += full[len(text) : len(text) + len(draft) + 1]
        passes += 1
    assert passes < 120


def test_larger_batches_get_shorter_drafts():
    tables = [NgramTable(np.array([[1, 2, 70], [2, 3, 70]], np.uint16), 300)]
    assert NgramDrafter(tables).propose(0, [1], batch_size=1, limit=9) == [2, 3]
    assert NgramDrafter(tables).propose(0, [1], batch_size=4, limit=9) == [2]
    assert NgramDrafter(tables).propose(0, [1], batch_size=64, limit=9) == []
    assert NgramDrafter(tables).propose(0, [1], batch_size=1, limit=1) == [2]
    assert NgramDrafter(tables).propose(0, [1], batch_size=1, limit=0) == []


def test_table_takes_little_more_memory_than_its_rows():
    rows = np.arange(40_000, dtype=np.uint16).reshape(-1, 4)
    tracemalloc.start()
    table = NgramTable(rows, 1 << 16)
    assert table.look_up([4, 5]) == (6, 7)
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes < 2 * rows.nbytes


def test_drafts_are_limited_even_if_certain():
    sure = [NgramTable(np.array([[i, i + 1, 100] for i in range(200)], np.uint32), 1 << 20)]
    assert NgramDrafter(sure).propose(0, [1], batch_size=1, limit=99) == list(range(2, 17))
    assert NgramDrafter(sure).propose(0, [1], batch_size=64, limit=99) == []
    long = NgramDrafter()
    long.propose(0, list(range(300)) * 300, batch_size=1, limit=1)
    assert len(long._indexes[0].following) < 1 << 17


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=200))
def test_tables_contain_the_most_frequent_continuations(tokens):
    tables = ngram_tables(np.array(tokens, np.uint16), max_bytes=1 << 20)
    known = {}
    for n in (2, 3, 4):
        following = defaultdict(Counter)
        for i in range(len(tokens) - n + 1):
            following[tuple(tokens[i : i + n - 1])][tokens[i + n - 1]] += 1
        expected = []
        for context, counts in sorted(following.items()):
            token, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
            percent = 100 * count // sum(counts.values())
            if count > 1:
                shorter = known.get(context[1:])
                if not shorter or shorter[0] != token or percent > shorter[1] + 15:
                    expected.append([*context, token, percent])
        for context, counts in following.items():
            token, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
            if count > 1:
                known[context] = token, 100 * count // sum(counts.values())
        assert tables[f"ngrams_{n}"].tolist() == expected


def test_small_tables_keep_the_most_frequent_ngrams():
    tokens = np.array([1, 2] * 50 + [3, 4] * 20 + [5, 6] * 3, np.uint16)
    tables = ngram_tables(tokens, max_bytes=4 * 3 * 2)
    assert tables["ngrams_2"][:, :2].tolist() == [[1, 2], [2, 1], [3, 4], [4, 3]]
    assert all(rows.size == 0 for name, rows in tables.items() if name != "ngrams_2")
    whole = ngram_tables(tokens, max_bytes=1 << 20)
    assert sum(rows.nbytes for rows in whole.values()) > 24


def test_training_with_ngrams_stores_them_beside_the_weights(run_here, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT)
    small = ["--set", "d_model=16", "--set", "context_length=16", "--set", "eval_every=5"]
    run = [tmp_path / "corpus.txt", "--steps", 10, *small, "--tokenizer", "char"]
    assert run_here("train", *run, "--ngrams", "--out", tmp_path / "m").returncode == 0
    assert len(model_dir.load_ngrams(tmp_path / "m", 300)["ngrams_3"]) > 10
    both = [
        run_here("generate", "--model", tmp_path / "m", "--prompt", "The", "--seed", 1, *more)
        for more in ((), ("--draft", "off"))
    ]
    assert both[0].stdout == both[1].stdout
    assert both[0].returncode == 0
    # A new run without them removes the old tables.
    assert run_here("train", *run, "--overwrite", "--out", tmp_path / "m").returncode == 0
    assert model_dir.load_ngrams(tmp_path / "m", 300) == {}


@pytest.mark.parametrize(
    "tables",
    [
        {"ngrams_3": np.array([[1, 2, 300, 50]], np.uint16)},
        {"ngrams_3": np.array([[1, 2, 3, 101]], np.uint16)},
        {"ngrams_3": np.array([[1, 2, 50]], np.uint16)},
        {"ngrams_9": np.zeros((1, 10), np.uint16)},
        {"ngrams_3": np.zeros((1, 4), np.float32)},
    ],
)
def test_invalid_table_is_an_error(tmp_path, tables):
    (tmp_path / "ngrams.safetensors").write_bytes(save(tables))
    with pytest.raises(ModelError, match=r"ngrams\.safetensors"):
        model_dir.load_ngrams(tmp_path, 300)
