"""Memorization: samples of the model copy its training text.

All texts share runs of bytes. Only a run far longer than those that unseen text of the same kind
shares with the training text is evidence of memorization.
"""

import math

import numpy as np

from tgen.corpus import PackedRows, TokenDataset
from tgen.corpus.overlap import find_members, prefix_sums, window_hashes
from tgen.corpus.steps import finish
from tgen.model.transformer import Transformer
from tgen.planning import side_work
from tgen.reports.number_format import count
from tgen.reports.training import DoneReport, MemorizationReport
from tgen.runs.prepare import PreparedRun
from tgen.runs.samples import generate_texts
from tgen.training.evaluation import evaluate_train

# Chance runs grow with the logarithm of the text sizes: to double one, square both. Real text is
# less even: pieces of 4 KB of tinyshakespeare share 20 to 49 bytes with its rest, the median is 26.
# Four times that, 104 bytes, are more than two whole lines of verse.
_LONG = 2  # times the natural run
_VERY_LONG = 4
_MIN_NATURAL_RUN = 20  # bytes, three or four words
# Training bits relative to held-out bits. Parts of one text differ by less: an n-gram model's
# average over its worst tenth is 0.95 for tinyshakespeare, and 0.83 for a Python manual whose
# chapters all differ.
_GAP = 0.75
_GAP_BITS = 0.1  # a smaller gap does not count, however small both are
_MIN_EPOCHS = 2  # with fewer, two parts of a text differ by chance
_MEMORIZED_BITS = 0.3  # per byte: a good model of unseen English needs three times as many
_CHUNK = 1 << 22  # bytes of the text whose hashes are in memory at a time
_SEARCHED_TOKENS = 1 << 22  # training tokens to search
_TRAIN_LOSS_TOKENS = 1 << 14  # training tokens to evaluate


def measure_memorization(
    prepared: PreparedRun,
    dataset: TokenDataset | PackedRows,
    done: DoneReport,
    model: Transformer,
) -> MemorizationReport:
    """Return the report on a model, whose samples are compared with the texts of the run."""
    tokenizer = prepared.tokenizer
    plan = prepared.record.plan
    prompts = [prepared.record.sample_prompt] * side_work.MEMORIZATION_SAMPLES
    n_tokens = min(side_work.MEMORIZATION_TOKENS, plan.generated_tokens)
    texts = finish(generate_texts(model, tokenizer, prompts, n_tokens, seed=0))
    generated = b"".join(texts)
    train = tokenizer.decode(dataset.train.ids[:_SEARCHED_TOKENS])
    held_out, rest = tokenizer.decode(dataset.val.ids[:])[: len(generated)], train
    is_packed = isinstance(dataset, PackedRows)  # rows, whose end is an answer like the others
    if not held_out:  # without a validation set, use the end of the training text
        rest, held_out = train[: -len(generated)], train[-len(generated) :]
    step = done.best_step or done.step  # of the saved weights
    max_tokens = min(_TRAIN_LOSS_TOKENS, plan.evaluated_tokens or _TRAIN_LOSS_TOKENS)
    nats = evaluate_train(model, dataset, max_tokens=max_tokens)
    n_targets, n_bytes = dataset.train.n_targets, prepared.record.train_bytes
    return judge_memorization(
        len(longest_shared_run(generated, train)),
        None if is_packed else len(longest_shared_run(held_out, rest)),
        train_bits_per_byte=nats / math.log(2) * n_targets / n_bytes,
        held_out_bits_per_byte=done.best_bits_per_byte,
        epochs=done.tokens * step / max(1, done.step) / max(1, len(dataset.train.ids)),
    )


def judge_memorization(
    longest_run: int,
    natural_run: int | None,
    *,
    train_bits_per_byte: float,
    held_out_bits_per_byte: float | None,
    epochs: float,
) -> MemorizationReport:
    """Judge by the bytes of two shared runs and the bits per byte on two texts.

    `longest_run` is shared by the samples and the training text, `natural_run` by as much held-out
    text and the training text. With nothing held out (`held_out_bits_per_byte` is None), the end of
    the training text takes its place; rows have no such end (None). A copied run is proof. After
    several epochs, much lower loss on training than on held-out text is a sign; with nothing held
    out, almost no loss is proof.
    """
    held_out, train = held_out_bits_per_byte, train_bits_per_byte
    ratio = longest_run / max(natural_run or 0, _MIN_NATURAL_RUN)
    unseen = "the end of the text" if held_out is None else "held-out text"
    runs = f"longest copied run {count(longest_run, 'byte')}"
    runs += "" if natural_run is None else f" ({unseen}: {natural_run})"
    bits = f"{train:.2f} bits/byte on the training text"
    if held_out is None and epochs >= _MIN_EPOCHS and train <= _MEMORIZED_BITS:
        verdict = f"memorizes: {bits}"
    elif ratio >= _VERY_LONG:
        verdict = f"memorizes: {runs}"
    elif ratio >= _LONG:
        verdict = f"begins to memorize: {runs}"
    elif (
        held_out is not None
        and epochs >= _MIN_EPOCHS
        and train <= min(_GAP * held_out, held_out - _GAP_BITS)
    ):
        verdict = f"begins to memorize: {bits}, {held_out:.2f} on held-out text; {runs}"
    else:
        verdict = f"does not memorize: {runs}"
    return MemorizationReport(
        longest_run_bytes=longest_run,
        natural_run_bytes=natural_run,
        train_bits_per_byte=train,
        held_out_bits_per_byte=held_out,
        verdict=verdict,
    )


def longest_shared_run(sample: bytes, text: bytes) -> bytes:
    """Return the longest run of bytes of the sample that occurs verbatim in the text.

    Of several equally long runs, the first in the text. Runs are compared by 64-bit hashes.
    """
    if not sample:
        return b""
    longest = b""
    for start in range(0, len(text), _CHUNK):
        # A run may begin in this chunk and end in the next.
        chunk = text[start : start + _CHUNK + len(sample) - 1]
        longest = max(longest, _longest_in_chunk(sample, chunk), key=len)
    return longest


def _longest_in_chunk(sample: bytes, text: bytes) -> bytes:
    """Search the length by doubling steps, then halving ones, among positions that still match."""
    sample_sums, text_sums = prefix_sums(sample), prefix_sums(text)
    starts, length, step = np.arange(len(text)), 0, 8
    while step:
        longer = length + step
        inside = starts[: np.searchsorted(starts, len(text) - longer, side="right")]
        n_windows = max(0, len(sample) - longer + 1)
        sample_hashes = window_hashes(sample_sums, np.arange(n_windows), longer)
        matches = find_members(window_hashes(text_sums, inside, longer), sample_hashes)
        if len(matches):
            starts, length, step = inside[matches], longer, step * 2
        else:
            step //= 2
    return text[starts[0] : starts[0] + length]
