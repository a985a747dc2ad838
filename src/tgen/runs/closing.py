"""Samples of a run's model, and the reports at the end: forgetting, memorization, results.

Forgetting by fine-tuning is the loss on a general text before and after. Without a text of the
user's, the base model writes one, since its own text is what it knows best. The plan has the number
of its texts.

Memorization means that samples of the model copy its training text. All texts share runs of bytes.
Only a run far longer than those that unseen text of the same kind shares with the training text is
evidence of memorization.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tgen import distributed
from tgen.config import SamplingConfig
from tgen.corpus import PackedRows, TokenDataset
from tgen.corpus.overlap import find_members, prefix_sums, window_hashes
from tgen.engine.torch_engine import TorchEngine
from tgen.generation.loop import generate
from tgen.lora import adapter as adapters
from tgen.lora import merging, training
from tgen.model.transformer import Transformer
from tgen.planning import budget
from tgen.planning.budget import TEXT_TOKENS
from tgen.reports.training import (
    DoneReport,
    MemorizationReport,
    PhaseReport,
    RunReport,
    SampleReport,
)
from tgen.runs import saved_state as run_state
from tgen.runs.fine_tuning import GENERAL_BYTES
from tgen.runs.prepare import PreparedRun
from tgen.runs.tokenizing import PhaseProgress
from tgen.tokenizer import Tokenizer
from tgen.training.evaluation import evaluate_alone, evaluate_train
from tgen.training.state import TrainState

T = TypeVar("T")
_WINDOW = 512  # tokens per window of the general text
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


def sample(prepared: PreparedRun, state: TrainState) -> Iterator[SampleReport]:
    """Generate one continuation of the run's prompt, with the step as the seed; on rank 0 only."""
    model = state.whole_model()
    if model is None:
        return
    record, tokenizer = prepared.record, prepared.tokenizer
    prompt, step = record.sample_prompt, state.progress.step
    n_tokens = min(budget.SAMPLE_TOKENS, record.plan.generated_tokens)
    if record.chat is not None:
        ids, stop = record.chat.sample_ids, [record.chat.end_id]
        (text,) = run_generator(_generate(model, tokenizer, [ids], n_tokens, stop=stop, seed=step))
    else:
        (text,) = run_generator(generate_texts(model, tokenizer, [prompt], n_tokens, seed=step))
    yield SampleReport(step=step, prompt=prompt, text=text)


def generate_texts(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[bytes], n_tokens: int, *, seed: int
) -> Generator[int, None, list[bytes]]:
    """Return a continuation of each prompt, and yield the tokens so far; all prompts must be
    equal."""
    ids = tokenizer.encode_prompt(prompts[0])[-model.config.context_length :]
    if not ids:  # an empty prompt and a tokenizer without an end-of-text token
        return [b"" for _ in prompts]
    stop = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt_ids = [ids for _ in prompts]
    return (yield from _generate(model, tokenizer, prompt_ids, n_tokens, stop=stop, seed=seed))


def run_generator(steps: Generator[object, None, T]) -> T:
    """Return the result of a generator, without what it yields."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    stop: Sequence[int],
    seed: int,
) -> Generator[int, None, list[bytes]]:
    """Return a continuation of each prompt, and yield the number of tokens so far."""
    texts: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingConfig(max_new_tokens=n_tokens, seed=seed)
    tokens = generate(TorchEngine(model), prompts, stop=stop, sampling=sampling)
    for n_done, token in enumerate(tokens, 1):
        texts[token.sequence].append(token.id)
        yield n_done
    return [tokenizer.decode(text, continuation=True) for text in texts]


def measure_before(
    out: Path, prepared: PreparedRun, state: TrainState, tokens_entry: Mapping[str, Any]
) -> Generator[PhaseReport, None, PreparedRun]:
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


def write_general(
    model: Transformer, tokenizer: Tokenizer, n_texts: int
) -> Generator[PhaseReport, None, bytes]:
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
        train=np.array([start]),
        val=ids,
        val_bytes=len(text),
        context_length=min(_WINDOW, model.config.context_length, len(ids)),
        batch_size=1,
        seed=0,
    )
    return evaluate_alone(model, dataset).bits_per_byte


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


def judge_memorization(
    longest_run: int,
    natural_run: int,
    *,
    train_bits_per_byte: float,
    held_out_bits_per_byte: float | None,
    epochs: float,
) -> MemorizationReport:
    """Judge by the bytes of two shared runs and the bits per byte on two texts.

    `longest_run` is shared by the samples and the training text, `natural_run` by as much held-out
    text and the training text. With nothing held out (`held_out_bits_per_byte` is None), the end of
    the training text takes its place. A copied run is proof. After several epochs, much lower loss
    on training than on held-out text is a sign; with nothing held out, almost no loss is proof.
    """
    held_out, train = held_out_bits_per_byte, train_bits_per_byte
    ratio = longest_run / max(natural_run, _MIN_NATURAL_RUN)
    unseen = "the end of the text" if held_out is None else "held-out text"
    runs = f"longest copied run {longest_run} bytes ({unseen}: {natural_run})"
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


def final_reports(
    out: Path,
    prepared: PreparedRun,
    dataset: TokenDataset | PackedRows,
    done: DoneReport,
    state: TrainState,
) -> Iterator[RunReport]:
    """Yield the memorization report of the best model, except of one trained on conversations, and
    the DoneReport; on rank 0 only."""
    if not distributed.is_rank_zero():
        return
    with _best_model(out, prepared, state) as model:
        plan = prepared.record.plan
        n_val = len(dataset.val)
        if plan.train.eval_tokens < n_val <= (plan.evaluated_tokens or n_val):  # only a part was
            yield PhaseReport(phase="evaluating all held-out text", saved=True)
            done = replace(done, best_bits_per_byte=evaluate_alone(model, dataset).bits_per_byte)
        if prepared.record.chat is None:
            yield PhaseReport(phase="measuring memorization", saved=True)
            yield _memorization(prepared, dataset, done, model)
        before, after, n_tokens = prepared.record.general_bits_per_byte, None, 0
        if before is not None:
            yield PhaseReport(phase="evaluating the general text", saved=True)
            after = general_bits_per_byte(model, prepared.tokenizer, prepared.general)
            n_tokens = len(prepared.tokenizer.encode_corpus(prepared.general)[0])
    yield replace(
        done,
        out=str(out),
        baselines=prepared.record.baselines,
        general_before=before,
        general_after=after,
        general_tokens=n_tokens,
    )


@contextmanager
def _best_model(out: Path, prepared: PreparedRun, state: TrainState) -> Iterator[Transformer]:
    """Yield the model that was saved; an adapter is loaded into the running model for a while, so
    that its base is not in memory twice."""
    adapter = prepared.new_adapter
    if adapter is None:
        bundle = merging.load(out)
        model = Transformer.from_arrays(bundle.config, bundle.arrays)
        if prepared.parallel != "fsdp":  # with FSDP, a GPU may be too small for the whole model
            model = model.to(prepared.device)
        yield model
        return
    newest = training.pairs_of(state.model, adapter.layout, adapter.shapes)
    best = adapters.read(out, state.model.config)
    training.load_pairs(state.model, adapter.layout, best.pairs)
    try:
        yield state.model.eval()
    finally:
        training.load_pairs(state.model, adapter.layout, newest)


def _memorization(
    prepared: PreparedRun,
    dataset: TokenDataset | PackedRows,
    done: DoneReport,
    model: Transformer,
) -> MemorizationReport:
    tokenizer = prepared.tokenizer
    plan = prepared.record.plan
    prompts = [prepared.record.sample_prompt] * budget.MEMORIZATION_SAMPLES
    n_tokens = min(budget.MEMORIZATION_TOKENS, plan.generated_tokens)
    texts = run_generator(generate_texts(model, tokenizer, prompts, n_tokens, seed=0))
    generated = b"".join(texts)
    train = tokenizer.decode(dataset.train[:_SEARCHED_TOKENS])
    held_out, rest = tokenizer.decode(dataset.val[:])[: len(generated)], train
    if not held_out:  # without a validation split, use the end of the training text
        rest, held_out = train[: -len(generated)], train[-len(generated) :]
    step = done.best_step or done.step  # of the saved weights
    max_tokens = min(_TRAIN_LOSS_TOKENS, plan.evaluated_tokens or _TRAIN_LOSS_TOKENS)
    nats = evaluate_train(model, dataset, max_tokens=max_tokens)
    return judge_memorization(
        len(longest_shared_run(generated, train)),
        len(longest_shared_run(held_out, rest)),
        train_bits_per_byte=nats / math.log(2) * dataset.train_tokens / prepared.record.train_bytes,
        held_out_bits_per_byte=done.best_bits_per_byte,
        epochs=done.tokens * step / max(1, done.step) / max(1, len(dataset.train)),
    )
