"""What a model writes on the way and at the end, and how it compares."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tgen import distributed
from tgen.checkpoint import model_dir
from tgen.config import SamplingConfig
from tgen.corpus import TokenDataset
from tgen.engine.torch_engine import TorchEngine
from tgen.generation.loop import generate
from tgen.model.transformer import Transformer
from tgen.reports import DoneReport, RunReport, SampleReport
from tgen.runs.prepared import PreparedRun
from tgen.tokenizer import Tokenizer
from tgen.training.evaluation import evaluate_train
from tgen.training.report.memorization import judge_memorization, longest_shared_run
from tgen.training.state import TrainState

_SAMPLE_TOKENS = 120
_ROWS, _TOKENS = 8, 128  # of the samples that are looked up
_TRAIN_TOKENS = 1 << 14  # to compare with
_COMPARED_TOKENS = 1 << 22  # of the training text that samples are looked up in


def sample(prepared: PreparedRun, state: TrainState) -> Iterator[SampleReport]:
    """One continuation of the run's prompt, with the step as its seed; from rank 0."""
    model = state.whole_model()
    if model is None:
        return
    prompt = prepared.record.sample_prompt
    step = state.progress.step
    (text,) = _write(model, prepared.tokenizer, [prompt], _SAMPLE_TOKENS, seed=step)
    yield SampleReport(step=state.progress.step, prompt=prompt, text=text)


def closing_reports(
    out: Path, prepared: PreparedRun, store: TokenDataset, done: DoneReport
) -> Iterator[RunReport]:
    """Whether the best model writes by heart, and the end; from rank 0."""
    if not distributed.is_rank_zero():
        return
    bundle = model_dir.load(out)
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    if prepared.parallel != "fsdp":  # a GPU that has a share may have no room for all
        model = model.to(prepared.device)
    prompt = prepared.record.sample_prompt
    written = b"".join(_write(model, bundle.tokenizer, [prompt] * _ROWS, _TOKENS, seed=0))
    known = bundle.tokenizer.decode(store.train[:_COMPARED_TOKENS])
    unseen, rest = bundle.tokenizer.decode(store.held_out[:])[: len(written)], known
    if not unseen:  # the text's own end is the next best
        rest, unseen = known[: -len(written)], known[-len(written) :]
    judged = done.best_step or done.step  # the weights that were kept
    nats = evaluate_train(model, store, max_tokens=_TRAIN_TOKENS)
    yield judge_memorization(
        len(longest_shared_run(written, known)),
        len(longest_shared_run(unseen, rest)),
        train_bits_per_byte=nats / math.log(2) * store.train_tokens / prepared.record.train_bytes,
        held_out_bits_per_byte=done.best_bits_per_byte,
        readings=done.tokens * judged / max(1, done.step) / max(1, len(store.train)),
    )
    yield replace(done, out=str(out), baselines=prepared.record.baselines)


def _write(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[bytes], n_tokens: int, *, seed: int
) -> list[bytes]:
    """A continuation of each prompt; they are all alike."""
    ids = tokenizer.encode_prompt(prompts[0])[-model.config.context_length :]
    if not ids:  # a foreign tokenizer without an end of text, and nothing to start from
        return [b"" for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    tokens = generate(
        TorchEngine(model),
        [ids for _ in prompts],
        stop=[] if tokenizer.end_of_text is None else [tokenizer.end_of_text],
        sampling=SamplingConfig(max_new_tokens=n_tokens, seed=seed),
    )
    for token in tokens:
        texts[token.row].append(token.id)
    return [tokenizer.decode(text, continues=True) for text in texts]
