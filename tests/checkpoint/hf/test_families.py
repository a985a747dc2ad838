"""Random models of transformers in tgen: logits, greedy text and attention weights are equal."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.transformers_models import VARIANTS, make_theirs
from tgen.checkpoint import model_dir
from tgen.config import EngineOptions, SamplingConfig
from tgen.engine.open_engine import open_engine
from tgen.inspection.attention import record_attention
from tgen.loaded_model import Decoding, LoadedModel
from tgen.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

LENGTH, N_NEW = 40, 8  # tokens of the text; of each greedy continuation
TOLERANCE = 1e-5  # of logits, relative to the largest
ROUNDED_INPUTS = 0.02  # products with bfloat16 weights round their inputs, too
PROMPTS = [list(range(2, 52)), [7, 3], [5] * 20]  # of different lengths


def describe(case: tuple[str, bool, str]) -> str:
    return f"{case[0]}-{'tied' if case[1] else 'untied'}-{case[2]}"


ONE = [(variant, False, "float32") for variant in VARIANTS]
# test_read_transformers.py has the other form of these.
OLDER = ("openai-gpt", "gpt2", "mistral", "qwen2", "qwen3")
OTHER = [(variant, True, "bfloat16") for variant in VARIANTS if variant not in OLDER]
in_two_forms = pytest.mark.parametrize("case", ONE + OTHER, ids=describe, indirect=True)
in_one_form = pytest.mark.parametrize("case", ONE, ids=describe, indirect=True)


class Case(SimpleNamespace):
    """A model in both programs, with some tokens."""

    def their_logits(self, ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return self.theirs(torch.tensor([ids])).logits[0].numpy()

    def engine(self, kind: str = "kernels", dtype: str = "float32"):
        bundle = model_dir.load(self.path)
        return open_engine(bundle, EngineOptions(device="cpu", threads=1, kind=kind, dtype=dtype))

    def loaded(self, kind: str = "kernels") -> LoadedModel:
        bundle = replace(model_dir.load(self.path), end_ids=frozenset())  # texts of any token
        return LoadedModel(bundle, self.engine(kind))


@pytest.fixture(scope="module")
def case(request, tokenizer, tmp_path_factory) -> Case:
    variant, tied, dtype = request.param
    path = tmp_path_factory.mktemp("theirs")
    make_theirs(variant, tokenizer, tied=tied).to(getattr(torch, dtype)).save_pretrained(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    (path / "tokenizer.json").write_text(tokenizer.json)
    random = torch.Generator().manual_seed(6)
    ids = torch.randint(2, tokenizer.vocab_size, (LENGTH,), generator=random).tolist()
    return Case(path=path, theirs=theirs, ids=ids, tied=tied, dtype=dtype)


def greedy(model: LoadedModel, prompts: list[list[int]], **how: object) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingConfig(temperature=0, max_new_tokens=N_NEW)
    for token in model.tokens(prompts, sampling=sampling, decoding=Decoding(**how)):
        texts[token.sequence].append(token.id)
    return texts


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@in_two_forms
def test_logits_are_equal_in_both_engines(case):
    expected = case.their_logits(case.ids)
    assert model_dir.load(case.path).config.tied_embeddings == case.tied
    for kind, dtype in {("torch", "float32"), ("kernels", "float32"), ("kernels", case.dtype)}:
        tolerance = TOLERANCE if dtype == "float32" else ROUNDED_INPUTS
        whole = case.engine(kind, dtype).extend([case.ids], every_position=True)
        assert relative_error(whole, expected) <= tolerance
        engine = case.engine(kind, dtype)
        parts = [case.ids[:7], case.ids[7:30], *([token] for token in case.ids[30:])]
        steps = [engine.extend([part], every_position=True) for part in parts]
        assert relative_error(np.concatenate(steps), expected) <= tolerance


@in_one_form
def test_logits_are_equal_in_double_precision(case):
    bundle = model_dir.load(case.path)
    with torch.no_grad():
        ours = Transformer.from_arrays(bundle.config, bundle.arrays).double()(
            torch.tensor([case.ids])
        )[0]
        theirs = case.theirs.double()(torch.tensor([case.ids])).logits[0]
        case.theirs.float()
    assert relative_error(ours.numpy(), theirs.numpy()) <= 1e-6  # tables are in float32


@in_two_forms
def test_greedy_text_is_equal_in_both_engines(case):
    """Their most likely token is ours, unless two are closer than the tolerance."""
    prompt = case.ids[:LENGTH]
    texts = {kind: greedy(case.loaded(kind), [prompt])[0] for kind in ("torch", "kernels")}
    for text in texts.values():
        assert len(text) == N_NEW
        logits = case.their_logits(prompt + text)[len(prompt) - 1 : -1]
        behind = logits.max(axis=1) - logits[np.arange(N_NEW), text]
        assert behind.max() <= TOLERANCE * np.abs(logits).max()


@in_one_form
@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_greedy_text_is_equal_in_a_batch_with_drafts_and_with_a_saved_cache(case, kind, tmp_path):
    model = case.loaded(kind)
    alone = [greedy(model, [prompt], draft="off")[0] for prompt in PROMPTS]
    assert greedy(model, PROMPTS, draft="off") == alone
    assert greedy(model, PROMPTS, draft="auto") == alone
    model.save_cache(tmp_path / "cache", model.cache_prompt(PROMPTS[0][:-5]))
    loaded = model.load_cache(tmp_path / "cache")
    assert greedy(model, PROMPTS[:1], prompt_cache=loaded)[0] == alone[0]


@in_one_form
def test_attention_weights_are_equal(case):
    bundle = model_dir.load(case.path)
    config = bundle.config
    heads = list(itertools.product(range(config.n_layers), range(config.n_heads)))
    reports, recorder = record_attention(
        Transformer.from_arrays(config, bundle.arrays), case.ids, heads
    )
    with torch.no_grad():
        attentions = case.theirs(torch.tensor([case.ids]), output_attentions=True).attentions
    for report in reports:
        theirs = attentions[report.layer][0, report.head].numpy()
        assert np.abs(report.weights - theirs).max() <= 3e-6
    assert recorder.kernel_error <= 1e-5
