"""Report memorization and results at the end of a run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tgen import distributed
from tgen.corpus import PackedRows, TokenDataset
from tgen.lora import adapter as adapters
from tgen.lora import merging
from tgen.model import lora
from tgen.model.transformer import Transformer
from tgen.reports.training import DoneReport, MemorizationReport, PhaseReport, RunReport
from tgen.runs.forgetting import general_bits_per_byte
from tgen.runs.prepare import PreparedRun
from tgen.runs.samples import generate_texts, run_generator
from tgen.training.evaluation import evaluate_alone, evaluate_train
from tgen.training.report.memorization import judge_memorization, longest_shared_run
from tgen.training.state import TrainState

_MEMORIZATION_SAMPLES, _MEMORIZATION_TOKENS = 8, 128  # to search for in the training text
_SEARCHED_TOKENS = 1 << 22  # training tokens to search
_TRAIN_LOSS_TOKENS = 1 << 14  # training tokens to evaluate


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
    newest = lora.pairs_of(state.model, adapter.layout, adapter.shapes)
    best = adapters.read(out, state.model.config)
    lora.load_pairs(state.model, adapter.layout, best.pairs)
    try:
        yield state.model.eval()
    finally:
        lora.load_pairs(state.model, adapter.layout, newest)


def _memorization(
    prepared: PreparedRun,
    dataset: TokenDataset | PackedRows,
    done: DoneReport,
    model: Transformer,
) -> MemorizationReport:
    tokenizer = prepared.tokenizer
    plan = prepared.record.plan
    prompts = [prepared.record.sample_prompt] * _MEMORIZATION_SAMPLES
    n_tokens = min(_MEMORIZATION_TOKENS, plan.generated_tokens)
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
