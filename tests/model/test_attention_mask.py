"""Spans of packed documents give the same attention as the mask."""

import pytest
import torch

from support.models import ALL_FAMILIES, make_model
from tgen.model.attention import document_spans


def number_documents(lengths: list[list[int]]) -> torch.Tensor:
    """(B, T) of sequences of documents of these lengths."""
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [*((family, False) for family in ALL_FAMILIES), ("gpt2", True), ("gemma3", True)],
)
def test_attention_in_spans_equals_attention_through_a_mask(family, checkpointing, monkeypatch):
    model = make_model(family, context_length=300).double()
    model.activation_checkpointing = checkpointing
    tokens = torch.randint(300, (2, 300), generator=torch.Generator().manual_seed(1))
    documents = number_documents([[1, 2, 90, 30, 40, 77, 60], [100, 150, 50]])
    assert document_spans(documents, None) is not None

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        hidden = model.hidden_states(tokens, documents=documents)
        hidden.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():  # with torch's fused kernel
            fused = model.hidden_states(tokens, documents=documents)
        return [hidden.detach(), fused, *gradients]

    in_spans = run()
    monkeypatch.setattr("tgen.model.transformer.document_spans", lambda *_: None)
    for ours, masked in zip(in_spans, run(), strict=True):
        torch.testing.assert_close(ours, masked, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(in_spans[0], in_spans[1], rtol=1e-9, atol=1e-9)


def test_spans_are_documents_or_short_ones_and_the_next():
    documents = number_documents([[1, 2, 90, 30, 40, 77, 60], [100, 145, 50, 5]])
    sequences = document_spans(documents, window=120)
    assert sequences is not None
    assert [[(span.length, span.mask is None) for span in spans] for spans in sequences] == [
        [(93, False), (70, False), (77, True), (60, True)],
        [(100, True), (145, False), (50, True), (5, True)],
    ]


@pytest.mark.parametrize("lengths", [[128, 128], [280, 20]], ids=["short", "long documents"])
def test_sequences_stay_whole_where_spans_would_not_be_faster(lengths):
    assert document_spans(number_documents([lengths] * 2), None) is None


def test_compiled_models_use_the_mask(monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert document_spans(number_documents([[100, 150, 50]]), None) is None
