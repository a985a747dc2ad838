"""From what the user asked for to a plan: text, tokenizer, tokens, and what to train."""

import hashlib
import secrets
from collections.abc import Generator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tgen import corpus, distributed
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_lookup import find_model
from tgen.config import TrainConfig
from tgen.errors import CorpusError, UsageError
from tgen.model.device import Device, choose_device, memory_bytes, n_threads, set_threads
from tgen.reports import Choice, PlanReport, PreparingReport
from tgen.runs import rank_sync
from tgen.runs.data import Texts, joined, split, tokenised, total
from tgen.runs.prepared import PreparedRun
from tgen.runs.request import RunRequest
from tgen.runs.run_record import RunRecord
from tgen.tokenizer import Tokenizer, make_tokenizer
from tgen.training.calibrate import measure_speed
from tgen.training.plan.model_size import PlanInputs
from tgen.training.plan.overrides import parse_overrides
from tgen.training.plan.param_shapes import n_parameters
from tgen.training.plan.plan import (
    CALIBRATION_SHARE,
    choose_tokenizer,
    make_plan,
    readable_bytes,
)
from tgen.training.plan.scaling_estimate import scaling_report
from tgen.training.report.baselines import ngram_bits_per_byte, xz_bits_per_byte

_TOKENIZER_BYTES = 1 << 23  # of text that a tokenizer is learnt from
_BASELINE_BYTES_PER_SECOND = 5e5
_BASELINE_BYTES = 1 << 24  # n-grams take fifty times as much memory
_COMPILING_MINUTES = 3
_PROMPT_FROM = 1 << 16  # bytes of a document whose first words are a sample's prompt


def prepare(
    request: RunRequest, *, folder: Path | None, with_baselines: bool = True
) -> Generator[PreparingReport, None, PreparedRun]:
    """Reads, splits and tokenises the corpus, times the machine, and plans; tokens that are too
    many for the memory are kept in `folder` (None: with temporary files).

    Of several ranks the first does so and tells the others, which lack the tokens then.

    Raises CorpusError, UsageError, ModelError; TgenError where ranks differ.
    """
    device = choose_device(request.device)
    set_threads(request.threads)
    wanted = request.start_from
    source = None if wanted is None else model_dir.load(find_model(str(wanted)).path)
    weights = None if source is None else source.arrays
    given = {"compile": _compile(request, device)} | parse_overrides(request.overrides)[1]
    config = replace(request.train, **given)
    share = 0.0 if config.steps else CALIBRATION_SHARE
    rank_sync.check_alike(device)
    memory = rank_sync.least_memory(device)
    if source is not None and distributed.ranks().world_size > 1:
        distributed.assert_same("the model", model_dir.digest(source)[:16])
    speed = sum(
        distributed.all_gather(measure_speed(device, seconds=min(2.0, config.minutes * 60 * share)))
    )
    most = readable_bytes(request.size, config, speed, None if source is None else source.config)
    text = corpus.read(request.corpus)
    distributed.assert_same("the corpus", text.sha256)
    if not distributed.is_rank_zero():
        text.close()
        return rank_sync.broadcast_prepared(None, device, weights)
    texts = split(text, config, most)
    tokenizer, tokenizer_choice = _tokenizer(request, source, texts)
    train, held_out = yield from tokenised(
        texts, tokenizer, config, folder=folder, threads=request.threads
    )
    if train.scored_bytes == 0:
        raise CorpusError("no row has a completion to learn", "add --set loss_on=all for prompts")
    elsewhere = request.n_ranks is not None or request.device_memory is not None
    facts = PlanInputs(
        vocab_size=tokenizer.vocab_size,
        train_tokens=len(train.tokens),
        held_out_tokens=len(held_out.tokens),
        splittable=bool((tokenizer.merge_pairs >= 0).any()),
        speed=speed,
        memory=None if elsewhere or distributed.launched() else memory_bytes(device),
        n_ranks=distributed.ranks().world_size,
    )
    plan = make_plan(
        family=request.family,
        size=request.size,
        train=replace(request.train, compile=config.compile),
        overrides=request.overrides,
        facts=facts,
        start_from=None if source is None else source.config,
    )
    compare = with_baselines and train.scored is None and held_out.scored is None
    baselines = _baselines(texts, config) if compare else {}
    notes = texts.notes + plan.notes
    if compare and texts.held_out and not baselines:
        notes.append("the text is too long for the time to compare with xz and n-grams")
    record = RunRecord(
        run_id=secrets.token_hex(8),
        corpus=request.corpus,
        corpus_sha256=texts.corpus.sha256,
        corpus_bytes=texts.corpus.n_bytes,
        train_bytes=train.scored_bytes,
        held_out_bytes=held_out.scored_bytes,
        tokenizer=tokenizer_choice,
        tokenizer_sha256=hashlib.sha256(tokenizer.json.encode()).hexdigest(),
        read_bytes=most,
        end_of_text=tokenizer.end_of_text,
        start_from=None if source is None else str(source.path.resolve()),
        plan=replace(plan, notes=notes),
        baselines=baselines,
        device=device.type,
        threads=n_threads() * distributed.ranks().local_world_size,
        tensorboard=request.tensorboard,
        ngrams=request.ngrams,
        sample_prompt=_sample_prompt(texts),
    )
    tokens = corpus.arrays(train, held_out)
    scaling = None
    if elsewhere:
        scaling = scaling_report(
            plan,
            facts,
            n_ranks=request.n_ranks or 1,
            device_memory=request.device_memory,
            on_gpu=request.device_memory is not None or device.type == "cuda",
            text_tokens=round(facts.train_tokens * texts.whole_bytes / total(texts.train)),
        )
    parallel = rank_sync.choose(plan, device, memory, request.parallel)
    prepared = PreparedRun(record, tokenizer, tokens, device, weights, parallel, scaling)
    return rank_sync.broadcast_prepared(prepared, device, weights)


def plan_report(out: Path, prepared: PreparedRun, *, step: int = 0) -> PlanReport:
    """What the run is going to do after `step`."""
    record, plan = prepared.record, prepared.record.plan
    model = plan.model
    return PlanReport(
        out=str(out),
        resumed_at_step=step,
        corpus_bytes=record.corpus_bytes,
        train_tokens=len(prepared.tokens["train"]),
        held_out_tokens=len(prepared.tokens["held_out"]),
        tokenizer=record.tokenizer.value,
        vocab_size=prepared.tokenizer.vocab_size,
        family=model.family,
        size=plan.size,
        n_parameters=n_parameters(model),
        context_length=plan.context_length,
        shape={name: getattr(model, name) for name in ("n_layers", "d_model", "n_heads", "d_ff")},
        batch_size=plan.train.batch_size,
        learning_rate=plan.train.learning_rate,
        minutes=None if plan.train.steps else plan.train.minutes,
        steps=plan.train.steps,
        device=str(prepared.device),
        threads=n_threads(),
        ranks=distributed.ranks().world_size,
        parallel=prepared.parallel,
        seed=plan.train.seed,
        choices=[record.tokenizer, *plan.choices],
        notes=plan.notes,
        scaling=prepared.scaling,
    )


def _tokenizer(
    request: RunRequest, source: model_dir.ModelBundle | None, texts: Texts
) -> tuple[Tokenizer, Choice]:
    if source is not None:
        return source.tokenizer, Choice("tokenizer", "given", "that of the model it starts from")
    sample = corpus.subsample(texts.train, _TOKENIZER_BYTES)
    parts = [part[:] for document in sample for part in document]
    kind, vocab_size, why = request.tokenizer, request.vocab_size, "asked for"
    if kind == "auto":
        alphabet = len(set(b"".join(parts)[: 1 << 20].decode("utf-8", errors="ignore")))
        kind, chosen, why = choose_tokenizer(total(texts.train), alphabet)
        vocab_size = vocab_size or chosen
    return make_tokenizer(kind, parts, vocab_size=vocab_size), Choice("tokenizer", kind, why)


def _compile(request: RunRequest, device: Device) -> bool:
    """A compiled step pays where its kernels come from Triton and the run is not over at once."""
    long = request.train.steps is None and request.train.minutes >= _COMPILING_MINUTES
    if request.compile and request.train.steps is None and not long:
        raise UsageError(
            f"--compile with --minutes {request.train.minutes:g}",
            f"compiling takes most of a minute: give {_COMPILING_MINUTES} or more",
        )
    if request.compile is not None:
        return request.compile
    return long and device.type == "cuda" and find_spec("triton") is not None


def _baselines(texts: Texts, config: TrainConfig) -> dict[str, float]:
    """Bits per byte of the held-out text by other means, for a twentieth of the time at most."""
    limit = min(_BASELINE_BYTES, _BASELINE_BYTES_PER_SECOND * config.minutes * 60 / 20)
    if total(texts.train) + total(texts.held_out) > limit:
        return {}
    train, held_out = joined(texts.train), joined(texts.held_out)
    if not train or not held_out or len(train) + len(held_out) > limit:
        return {}
    return {
        "xz -9": xz_bits_per_byte(train, held_out),
        "order-5 n-grams": ngram_bits_per_byte(train, held_out),
    }


def _sample_prompt(texts: Texts) -> bytes:
    """The beginning of a document: its first words, or the end of a row's prompt."""
    document = (texts.held_out or texts.train)[0]
    if len(document) > 1:
        return document[0][-1000:]
    words = document[0][:_PROMPT_FROM].lstrip()[:24].rsplit(None, 1)
    return words[0] if words else document[0][:24]
