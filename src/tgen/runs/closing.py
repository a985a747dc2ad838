"""The reports at the end of a run: memorization, forgetting, results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tgen import distributed
from tgen.corpus import PackedRows, TokenDataset
from tgen.lora import adapter as adapters
from tgen.lora import merging, training
from tgen.model.transformer import Transformer
from tgen.reports.training import DoneReport, PhaseReport, RunReport
from tgen.runs.forgetting import general_bits_per_byte
from tgen.runs.memorization import measure_memorization
from tgen.runs.prepare import PreparedRun
from tgen.training.evaluation import evaluate_alone
from tgen.training.state import TrainState


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
            yield measure_memorization(prepared, dataset, done, model)
        before, after, n_tokens = prepared.record.general_bits_per_byte, None, 0
        if before is not None:
            yield PhaseReport(phase="evaluating the general text", saved=True)
            after = general_bits_per_byte(model, prepared.tokenizer, prepared.general)
            n_tokens = len(prepared.tokenizer.encode_corpus(prepared.general)[0])
    yield replace(
        done,
        out=str(out),
        sample_prompt=prepared.record.sample_prompt,
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
