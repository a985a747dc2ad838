"""Forgetting by fine-tuning: the loss on a general text before and after.

Without a text of the user's, the base model writes one, since its own text is what it knows best.
The plan has the number of its texts.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tgen import distributed
from tgen.corpus import TokenDataset, Tokens
from tgen.model.transformer import Transformer
from tgen.planning.side_work import TEXT_TOKENS
from tgen.reports.training import PhaseReport
from tgen.runs import saved_state as run_state
from tgen.runs.general_text import GENERAL_BYTES
from tgen.runs.prepare import PreparedRun
from tgen.runs.samples import generate_texts
from tgen.runs.tokenizing import PhaseProgress, Phases
from tgen.tokenizer import Tokenizer
from tgen.training.evaluation import evaluate_alone
from tgen.training.state import TrainState

_WINDOW = 512  # tokens per window of the general text


def measure_before(
    out: Path, prepared: PreparedRun, state: TrainState, tokens_entry: Mapping[str, Any]
) -> Phases[PreparedRun]:
    """Write the general text, measure its loss before the first step, and save both; on rank 0.

    Do nothing if that is done, if the run has taken a step, or if the plan has no general text. All
    ranks must call this.
    """
    record, text = prepared.record, prepared.general
    is_done = record.general_bits_per_byte is not None or state.progress.step > 0
    if record.start_from is None or is_done or not (text or record.plan.general_texts):
        return prepared
    model = state.whole_model()
    if not distributed.is_rank_zero():
        return prepared
    assert model is not None
    if not text:
        text = yield from write_general(model, prepared.tokenizer, record.plan.general_texts)
        run_state.save_general(out, text)
    yield PhaseReport(phase="evaluating the general text", saved=True)
    before = general_bits_per_byte(model, prepared.tokenizer, text)
    record = replace(record, general_bits_per_byte=before)
    run_state.save_record(out, record.to_dict(), tokens_entry)
    return replace(prepared, general=text, record=record)


def write_general(model: Transformer, tokenizer: Tokenizer, n_texts: int) -> Phases[bytes]:
    """Return `n_texts` texts of the model, always the same; empty if it needs a prompt."""
    steps = generate_texts(model, tokenizer, [b""] * n_texts, TEXT_TOKENS, seed=0)
    progress = PhaseProgress("writing the general text", n_texts * TEXT_TOKENS, saved=True)
    texts = yield from progress.report(steps)
    return b"\n".join(texts)[:GENERAL_BYTES] if any(texts) else b""


def general_bits_per_byte(model: Transformer, tokenizer: Tokenizer, text: bytes) -> float | None:
    """Return the bits per byte of a text; None if it has too few tokens."""
    ids = tokenizer.encode_corpus(text)[0]
    if len(ids) < 2:
        return None
    start = ids[0] if tokenizer.end_of_text is None else tokenizer.end_of_text
    dataset = TokenDataset(
        train=Tokens(np.array([start])),
        val=Tokens(ids),
        val_bytes=len(text),
        context_length=min(_WINDOW, model.config.context_length, len(ids)),
        batch_size=1,
        seed=0,
    )
    return evaluate_alone(model, dataset).bits_per_byte
