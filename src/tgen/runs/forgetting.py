"""What a model forgets by fine-tuning: its loss on a general text before and after.

Without a text of the user's, the base model writes one, since its own text is what it knows best.
"""

from dataclasses import replace

import numpy as np

from tgen import distributed
from tgen.corpus import TokenDataset
from tgen.model.transformer import Transformer
from tgen.runs.fine_tuning import GENERAL_BYTES
from tgen.runs.prepare import PreparedRun
from tgen.runs.samples import generate_texts
from tgen.tokenizer import Tokenizer
from tgen.training.evaluation import evaluate_alone
from tgen.training.plan.param_shapes import n_parameters
from tgen.training.state import TrainState

_TEXT_TOKENS, _MIN_TEXTS, _MAX_TEXTS = 64, 8, 128
_FLOPS = 3e12  # for all texts: a large model writes fewer
_WINDOW = 512  # tokens


def measure_before(prepared: PreparedRun, state: TrainState) -> PreparedRun:
    """Add the general text and its loss to a run that starts from a model; on rank 0 only."""
    record, model = prepared.record, state.model
    sharded = prepared.parallel == "fsdp"
    if record.start_from is None or sharded or not distributed.is_rank_zero():
        return prepared
    text = prepared.general or write_general(model, prepared.tokenizer)
    before = general_bits_per_byte(model, prepared.tokenizer, text)
    return replace(prepared, general=text, record=replace(record, general_bits_per_byte=before))


def write_general(model: Transformer, tokenizer: Tokenizer) -> bytes:
    """Return a text that the model writes, always the same; empty if it needs a prompt."""
    n = round(_FLOPS / (2 * n_parameters(model.config) * _TEXT_TOKENS))
    n = min(_MAX_TEXTS, max(_MIN_TEXTS, n))
    texts = generate_texts(model, tokenizer, [b""] * n, _TEXT_TOKENS, seed=0)
    return b"\n".join(texts)[:GENERAL_BYTES]


def general_bits_per_byte(model: Transformer, tokenizer: Tokenizer, text: bytes) -> float | None:
    """Return the bits per byte of a text; None if it has too few tokens."""
    ids = tokenizer.encode_corpus(text)[0]
    if len(ids) < 2:
        return None
    start = ids[0] if tokenizer.end_of_text is None else tokenizer.end_of_text
    dataset = TokenDataset(
        train=np.array([start]),
        val=ids,
        val_bytes=len(text),
        context_length=min(_WINDOW, model.config.context_length, len(ids)),
        batch_size=1,
        seed=0,
    )
    return evaluate_alone(model, dataset).bits_per_byte
