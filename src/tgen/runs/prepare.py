"""Prepare a run: read and tokenize the corpus, time the machine, and plan the training."""

import hashlib
import platform
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen import corpus, distributed
from tgen.checkpoint import model_dir
from tgen.config.option import require
from tgen.config.training import Parallel, TrainConfig
from tgen.corpus import Documents, PackedRows, TokenDataset, Tokens
from tgen.errors import DivergedError, TrainingError, UsageError
from tgen.lora.matrices import NewAdapter, Pair
from tgen.machine.device import (
    Device,
    choose_device,
    describe_device,
    memory_bytes,
    n_threads,
    set_threads,
)
from tgen.model.precision import computes_bfloat16
from tgen.planning.costs import (
    MeasuredStep,
    flops_per_token,
    matmul_params,
    n_parameters,
    step_seconds,
)
from tgen.planning.memory import fitting_context
from tgen.planning.model_size import PlanInputs
from tgen.planning.multi_gpu import scaling_report
from tgen.planning.plan import CALIBRATION_SHARE, Plan, make_plan, usable_bytes
from tgen.planning.shape_search import nearest_size
from tgen.planning.side_work import baseline_seconds, fits_baselines
from tgen.reports.training import PhaseReport, PlanReport, ScalingReport
from tgen.runs import rank_checks
from tgen.runs.base_model import Base, open_base, source_optimizer
from tgen.runs.chat_rows import prepare_rows, rows_report
from tgen.runs.general_text import cut_general, read_general
from tgen.runs.output_folder import own_files
from tgen.runs.overrides import parse_overrides
from tgen.runs.request import RunRequest
from tgen.runs.run_record import RunRecord, recorded_corpus
from tgen.runs.text_sources import training_documents
from tgen.runs.tokenizing import (
    PhaseProgress,
    Phases,
    PreparedText,
    broadcast_prepared,
    hold_out,
    join_documents,
    max_val_bytes,
    prepare_texts,
    row_lengths,
)
from tgen.tokenizer import Tokenizer
from tgen.training.baselines import ngram_bits_per_byte, xz_bits_per_byte
from tgen.training.machine_speed import MIN_STEPS, measure_speed, measure_step
from tgen.training.state import TrainState, new_state
from tgen.version import __version__

_MIN_BASELINE_BYTES = 1000  # held out
_MIN_COMPILED_MINUTES = 3
_MAX_STEP_SECONDS = 5.0  # of a measurement of steps, whose durations vary by 10%
_MEMORIZING_STEP_SECONDS = 1.0  # for answers that are soon learned
_LONG_WINDOW = 1024  # tokens of a conversation for a new model
_NGRAM_SHARE = 1 / 40  # size of the n-gram tables relative to the weights
_NO_TOKENS = Tokens(np.zeros(0, np.uint16))  # of ranks other than 0, until they are on disk


@dataclass(frozen=True)
class PreparedRun:
    """All inputs of training besides its state."""

    record: RunRecord
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    device: Device
    weights: Mapping[str, NDArray[Any]] | None = None  # initial weights, to fine-tune
    pairs: Mapping[str, Pair] | None = None  # of the adapter to continue
    general: bytes = b""  # text whose loss is reported before and after fine-tuning
    parallel: Parallel | None = None  # how ranks share the model; None: a single process
    scaling: ScalingReport | None = None  # only if requested by a dry run
    baseline_text: tuple[Documents, Documents] | None = None  # to measure baselines on, until then
    index_text: Documents | None = None  # to index
    ends: list[list[int]] = field(default_factory=list)  # to repeat, see `Progress`

    def new_state(self, *, restored: bool = False) -> TrainState:
        """Return the training state before the first step; if it will be `restored`, its weights
        do not matter."""
        plan = self.record.plan
        counts = None
        if plan.train.bigram_start and len(self.train.ids) and not restored:
            counts = corpus.count_bigrams(self.train.ids, plan.model.vocab_size)
        state = new_state(
            plan.model,
            plan.train,
            self.device,
            weights=self.weights,
            bigram_counts=counts,
            adapter=self.new_adapter,
            parallel=self.parallel,
            restored=restored,
        )
        state.progress.closing_seconds = plan.closing_seconds
        state.progress.ends_to_repeat = self.ends
        if self.record.start_from is not None and plan.tokens_per_second:
            n_tokens = plan.train.batch_size * plan.context_length
            state.progress.planned_step_seconds = n_tokens / plan.tokens_per_second
        return state

    @property
    def new_adapter(self) -> NewAdapter | None:
        """The LoRA adapter before the first step; None: all weights are trained."""
        record = self.record.adapter
        if record is None:
            return None
        return record.new_adapter(self.record.plan.model, self.pairs)

    @cached_property
    def ngrams(self) -> Mapping[str, NDArray[Any]]:
        """Tables of frequent n-grams to store with the model; empty unless requested."""
        if not self.record.ngrams:
            return {}
        max_bytes = round(_NGRAM_SHARE * 4 * matmul_params(self.record.plan.model))
        return corpus.ngram_tables(self.train.ids, max_bytes=max_bytes)

    def dataset(self) -> TokenDataset | PackedRows:
        """Return the tokens as batches, with whole rows if these are conversations or answers to
        learn; BPE-dropout needs windows of a stream."""
        plan = self.record.plan
        if self.answers is not None and not plan.train.bpe_dropout:
            return self.answers
        if self.record.chat is not None:
            return self._packed_rows(self.train, self.val)
        return TokenDataset(
            self.train,
            self.val,
            end_of_text=self.tokenizer.end_of_text,
            begin_of_text=self.record.begin_of_text,
            merge_pairs=self.tokenizer.merge_pairs if plan.train.bpe_dropout > 0 else None,
            val_bytes=self.record.held_out_bytes,
            context_length=plan.context_length,
            batch_size=plan.train.batch_size,
            seed=plan.train.seed,
        )

    @cached_property
    def answers(self) -> PackedRows | None:
        """The rows whose answers end the run once they are learned; None: it ends otherwise."""
        record, train, val = self.record, self.train, self.val
        if record.held_out_bytes or not record.plan.ends_when_learned:
            return None
        if record.chat is None:
            lengths, all_rows = row_lengths(train, self.tokenizer)
            if not all_rows or lengths.max() > record.plan.context_length:  # of another corpus
                return None
            train = replace(train, row_lengths=lengths)
            val = Tokens(val.ids, np.zeros(0, np.bool_), lengths[:0])
        return self._packed_rows(train, val)

    def _packed_rows(self, train: Tokens, val: Tokens) -> PackedRows:
        return PackedRows(
            train,
            val,
            val_bytes=self.record.held_out_bytes,
            context_length=self.record.plan.context_length,
            batch_size=self.record.plan.train.batch_size,
            seed=self.record.plan.train.seed,
        )

    def environment(self) -> dict[str, Any]:
        """Return the versions and the hardware that exact results depend on."""
        return {
            "tgen": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            **describe_device(self.device),
            "ranks": distributed.ranks().world_size,
        }


def _longest_window(base: Base, device: Device) -> int:
    """Return the most tokens of a conversation: for a base model, as many as memory and its context
    allow."""
    if base.config is None:
        return _LONG_WINDOW
    memory = None if distributed.launched() else memory_bytes(device)
    wanted, on_gpu = base.config.context_length, device.type != "cpu"
    return fitting_context(base.config, wanted, memory, frozen=base.frozen, on_gpu=on_gpu)


class _Machine(NamedTuple):
    """The measured speed and memory of all ranks' machines."""

    device: Device
    speed: float  # FLOP/s in float32
    bfloat16_speed: float | None  # None if a rank's products are not faster
    rank_memory: int | None  # bytes of the smallest rank


def prepare(request: RunRequest, *, folder: Path | None) -> Phases[PreparedRun]:
    """Open the base model, time the machine, read and tokenize the corpus, make the plan, and
    record all of it.

    Write tokens that do not fit into memory to a temporary file in `folder` (None: the system's
    temporary directory). Rank 0 prepares and broadcasts the result; the tokens of other ranks are
    empty. Raise CorpusError, UsageError or ModelError; TgenError if ranks differ.
    """
    started_at = time.monotonic() if request.began is None else request.began
    device = choose_device(request.device)
    set_threads(request.threads)
    model_fields, train_fields = parse_overrides(request.overrides)
    length = model_fields.get("context_length", 1)
    require(length >= 1, "context_length", length, "a number of at least 1")
    config = replace(request.train, compile=_compile(request, device), **train_fields)
    if request.start_from is not None or request.adapter is not None:
        yield PhaseReport(phase="loading the model")
    base, config = open_base(request, config)
    machine = yield from _measure_machine(device, config, base)
    fastest = max(machine.speed, machine.bfloat16_speed or 0.0)
    size: str | None = request.size
    if request.parameters is not None:
        size = nearest_size(request.parameters)
    max_bytes = usable_bytes(size, config, fastest, base.config)
    rank_checks.check_same_corpus(request.corpus)
    if not distributed.is_rank_zero():
        return broadcast_run(None, device, base.weights, base.pairs)
    if request.general is not None:
        reading = PhaseProgress("reading the general text", 1)
        general = yield from reading.report(read_general(request.general, request.reading))
        base = replace(base, general=general)
    documents = yield from _open_corpus(request, config)
    config, few_rows = hold_out(documents, config)
    if documents.is_chat:
        text = yield from prepare_rows(
            request,
            base.bundle,
            documents,
            config,
            context_length=model_fields.get("context_length"),
            longest=_longest_window(base, device),
            max_bytes=max_bytes,
            folder=folder,
        )
        model_fields.setdefault("context_length", text.context_length)
    else:
        text = yield from prepare_texts(
            request, base.bundle, documents, config, max_bytes=max_bytes, folder=folder
        )
    plan, inputs = yield from _make_plan(
        request, config, model_fields, machine, base, text, started_at
    )
    notes = [*(base.bundle.warnings if base.bundle else ()), *few_rows, *text.notes, *plan.notes]
    if lossy := [name for name in text.tokenizer.spec.normalizers if name != "NFC"]:
        notes.append(f"the tokenizer changes the text before it is learned ({', '.join(lossy)})")
    baseline_text = text.comparable
    if baseline_text is not None and not fits_baselines(
        sum(documents.n_bytes + len(documents) for documents in baseline_text), config.minutes
    ):
        baseline_text = None
        notes.append("no baselines (xz, n-grams): they would take too much of the time budget")
    elif baseline_text is not None and baseline_text[1].n_bytes < _MIN_BASELINE_BYTES:
        baseline_text = None  # too few bytes to compare anything on
    general = base.general
    if inputs.general_tokens is not None:
        general = cut_general(general, inputs.general_tokens, plan.general_tokens)
    plan = replace(plan, notes=notes)
    record = _record(request, documents, base, text, plan, device, max_bytes)
    prepared = PreparedRun(
        record,
        text.tokenizer,
        text.train,
        text.val,
        device,
        base.weights,
        base.pairs,
        general,
        rank_checks.resolve_parallel(
            plan, device, machine.rank_memory, request.parallel, frozen=base.frozen
        ),
        _scaling(request, plan, inputs, text, device) if request.is_estimate else None,
        baseline_text,
        training_documents(documents, record) if request.index else None,
    )
    return broadcast_run(prepared, device, base.weights, base.pairs)


def _measure_machine(device: Device, config: TrainConfig, base: Base) -> Phases[_Machine]:
    """Time all ranks, after a check that they are alike."""
    rank_checks.check_same_software(device)
    memory = rank_checks.min_rank_memory(device)
    if base.bundle is not None and distributed.ranks().world_size > 1:
        distributed.assert_same("the model", model_dir.digest(base.bundle)[:16])
    share = 0.0 if config.steps else CALIBRATION_SHARE
    seconds = min(1.0, config.minutes * 60 * share / 2)
    yield PhaseReport(phase="measuring this machine")
    speed = sum(distributed.all_gather(measure_speed(device, "float32", seconds=seconds)))
    bfloat16_speed = None
    if all(distributed.all_gather(computes_bfloat16(device))):
        speeds = distributed.all_gather(measure_speed(device, "bfloat16", seconds=seconds))
        bfloat16_speed = sum(speeds)
    return _Machine(device, speed, bfloat16_speed, memory)


def _open_corpus(request: RunRequest, config: TrainConfig) -> Phases[corpus.Corpus]:
    """Read the corpus as far as its documents; raise UsageError if --template or loss_on does
    not fit it."""
    text = yield from PhaseProgress("reading the corpus", 1).report(
        corpus.read_in_steps(
            request.corpus, chat=request.chat, own_files=own_files, reading=request.reading
        )
    )
    if request.template is not None and not text.is_chat:
        hint = "remove --template, or add --chat for prompt rows"
        raise UsageError("--template needs rows of messages", hint)
    has_rows = text.is_chat or text.documents.is_row.any()
    if "loss_on" in config.changed and not has_rows:
        raise UsageError(
            f"loss_on={config.loss_on}: has no effect without prompt/completion rows",
            "remove loss_on",
            field="loss_on",
        )
    return text


def _make_plan(
    request: RunRequest,
    config: TrainConfig,
    model_fields: dict[str, Any],
    machine: _Machine,
    base: Base,
    text: PreparedText,
    started_at: float,
) -> Phases[tuple[Plan, PlanInputs]]:
    """Make the plan, and once more after a step of it is measured, unless it is an estimate."""
    on_cpu = machine.device.type == "cpu" and request.device_memory is None
    alone = not request.is_estimate and not distributed.launched()
    inputs = PlanInputs(
        vocab_size=text.tokenizer.vocab_size,
        train_tokens=len(text.train.ids),
        val_tokens=len(text.val.ids),
        train_rows=text.n_examples,
        longest_row=text.longest_row,
        longest_text=text.longest_text,
        n_answers=0 if text.held_out_bytes or config.loss_on == "all" else text.n_answers,
        # Whole rows have no BPE-dropout.
        has_merges=text.chat is None and bool((text.tokenizer.merge_pairs >= 0).any()),
        flops_per_second=machine.speed,
        bfloat16_flops_per_second=machine.bfloat16_speed,
        memory=memory_bytes(machine.device) if alone else None,
        rank_memory=request.device_memory if request.is_estimate else machine.rank_memory,
        n_ranks=distributed.ranks().world_size,
        on_cpu=on_cpu,
        source_optimizer=None if base.bundle is None else source_optimizer(base.bundle.path),
        general_tokens=len(text.tokenizer.encode_corpus(base.general)[0]) if base.general else None,
        frozen=base.frozen,
    )
    choose = partial(
        make_plan,
        family=request.family,
        size=request.size,
        parameters=request.parameters,
        train=config,
        model_fields=model_fields,
        start_from=base.config,
    )
    yield PhaseReport(phase="planning")
    if base.bundle is not None:
        inputs = replace(inputs, setup_seconds=time.monotonic() - started_at)
    plan = choose(inputs=inputs)
    if base.bundle is None and inputs.n_ranks == 1 and not request.is_estimate:
        yield PhaseReport(phase="measuring a training step")
        inputs = replace(inputs, measured_step=_measure_step(plan, inputs, machine.device))
        plan = choose(inputs=replace(inputs, setup_seconds=time.monotonic() - started_at))
    return plan, inputs


def _record(
    request: RunRequest,
    documents: corpus.Corpus,
    base: Base,
    text: PreparedText,
    plan: Plan,
    device: Device,
    max_bytes: int,
) -> RunRecord:
    """Return the record of a new run."""
    return RunRecord(
        run_id=new_run_id(),
        corpus=recorded_corpus(request.corpus),
        corpus_sha256=documents.sha256,
        corpus_bytes=documents.n_bytes,
        train_bytes=text.train_bytes,
        held_out_bytes=text.held_out_bytes,
        tokenizer=text.tokenizer_choice,
        tokenizer_sha256=hashlib.sha256(text.tokenizer.json.encode()).hexdigest(),
        end_of_text=text.tokenizer.end_of_text,
        start_from=None if base.bundle is None else str(base.bundle.path.resolve()),
        adapter_from=None if request.adapter is None else _absolute(request.adapter),
        inherited=text.inherited,
        plan=plan,
        baselines={},
        device=device.type,
        threads=n_threads() * distributed.ranks().local_world_size,
        tensorboard=request.tensorboard,
        log=request.log,
        read_bytes=max_bytes,
        max_val_bytes=max_val_bytes(plan.train),
        sample_pieces=corpus.PIECES,
        ngrams=request.ngrams,
        index=request.index,
        adapter=base.adapter,
        sample_prompt=text.sample_prompt,
        exact_epochs=True,
        chat=text.chat,
        begin_of_text=text.begin_of_text,
        reading=request.reading,
        detected_encodings=documents.detected_encodings,
        command=request.command,
    )


def _absolute(path: Path) -> str:
    """Return an absolute path, or the name of a model that is found by its name."""
    return str(path.resolve() if path.exists() else path)


def _scaling(
    request: RunRequest, plan: Plan, inputs: PlanInputs, text: PreparedText, device: Device
) -> ScalingReport:
    """Estimate the run on many ranks; all of the training text counts, not only its sample."""
    n_tokens = len(text.train.ids) if text.whole_tokens is None else text.whole_tokens
    return scaling_report(
        plan,
        inputs,
        n_ranks=request.n_ranks or 1,
        device_memory=request.device_memory,
        on_gpu=request.device_memory is not None or device.type == "cuda",
        text_tokens=n_tokens,
    )


def _measure_step(plan: Plan, inputs: PlanInputs, device: Device) -> MeasuredStep | None:
    """Return the duration of a step of the plan; None with `steps`, which need no estimate, and if
    the measurement would take too much of the minutes."""
    seconds = 60 * plan.train.minutes * CALIBRATION_SHARE
    n_tokens = plan.train.passes * plan.train.batch_size * plan.context_length
    precision = plan.train.precision
    estimate = step_seconds(
        plan.model,
        n_tokens,
        inputs.speed(precision),
        precision=precision,
        context=plan.context_length,
        muon=plan.train.optimizer == "muon",
    )
    too_long = plan.train.compile or MIN_STEPS * estimate > 2 * seconds
    if plan.train.steps is not None or too_long:
        return None
    limit = _MEMORIZING_STEP_SECONDS if inputs.memorizes_rows else _MAX_STEP_SECONDS
    try:
        return measure_step(plan.model, plan.train, device, seconds=min(limit, seconds))
    except DivergedError as error:
        raise TrainingError(
            error.message, f"set lower learning rates than {plan.train.rates}"
        ) from None


def plan_report(out: Path, prepared: PreparedRun, *, step: int = 0) -> PlanReport:
    """Return the plan of the run, to continue after `step`."""
    record, plan = prepared.record, prepared.record.plan
    model = plan.model
    return PlanReport(
        out=str(out),
        resumed_at_step=step,
        corpus_bytes=record.corpus_bytes,
        train_tokens=len(prepared.train.ids),
        held_out_tokens=len(prepared.val.ids),
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
        corpus_sha256=record.corpus_sha256,
        tokens_per_second=plan.tokens_per_second,
        flops_per_token=plan.train.passes
        * flops_per_token(
            replace(model, context_length=plan.context_length), frozen=record.adapter is not None
        ),
        settings=asdict(plan.train),
        choices=[record.tokenizer, *plan.choices],
        notes=plan.notes,
        scaling=prepared.scaling,
        rows=None
        if record.chat is None
        else rows_report(record.chat, prepared.train, prepared.tokenizer),
    )


def _compile(request: RunRequest, device: Device) -> bool:
    """Return whether to compile the step: by default on CUDA with Triton, if `minutes` are many."""
    is_long = request.train.steps is None and request.train.minutes >= _MIN_COMPILED_MINUTES
    if request.compile and request.train.steps is None and not is_long:
        raise UsageError(
            f"--compile cannot be combined with --minutes {request.train.minutes:g}: compiling "
            "takes most of a minute",
            f"set --minutes to {_MIN_COMPILED_MINUTES} or more",
        )
    if request.compile is not None:
        return request.compile
    return is_long and device.type == "cuda" and find_spec("triton") is not None


def measure_baselines(prepared: PreparedRun) -> Phases[PreparedRun]:
    """Add the bits per byte of other compressors, if the plan has them."""
    if (texts := prepared.baseline_text) is None:
        return prepared
    seconds = baseline_seconds(sum(documents.n_bytes for documents in texts))
    yield PhaseReport(phase="baselines (xz, n-grams)", seconds_left=seconds)
    train, val = map(join_documents, texts)
    baselines = {
        "xz -9": xz_bits_per_byte(train, val),
        "order-5 n-grams": ngram_bits_per_byte(train, val),
    }
    record = replace(prepared.record, baselines=baselines)
    return replace(prepared, record=record, baseline_text=None)


def new_run_id() -> str:
    """Return a random id of a run."""
    return secrets.token_hex(8)


def broadcast_run(
    prepared: PreparedRun | None,
    device: Device,
    weights: Mapping[str, NDArray[Any]] | None,
    pairs: Mapping[str, Pair] | None,
) -> PreparedRun:
    """Broadcast rank 0's prepared run; the tokens of other ranks are empty."""
    values = prepared and (
        prepared.record,
        prepared.tokenizer.json,
        prepared.parallel,
        prepared.ends,
    )
    record, tokenizer, parallel, ends = broadcast_prepared(values)
    if prepared is not None:
        return prepared
    n_rows = record.plan.model.vocab_size
    tokenizer = Tokenizer(tokenizer, end_ids=record.end_ids, n_rows=n_rows)
    return PreparedRun(
        record,
        tokenizer,
        _NO_TOKENS,
        _NO_TOKENS,
        device,
        weights,
        pairs,
        parallel=parallel,
        ends=ends,
    )
