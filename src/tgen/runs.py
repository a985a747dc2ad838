"""One training run from the corpus to the model directory, as an iterator of reports.

    for report in start(RunRequest(corpus=["corpus.txt"], out=Path("models/corpus"))): ...

The newest state and the best weights are on disk whenever an EvalReport or the DoneReport arrives.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tgen import corpus, files
from tgen.checkpoint import directory, run_log, run_state
from tgen.config import DEFAULT_FAMILY, Family, ModelConfig, SamplingConfig, Size, TrainConfig
from tgen.engine.torch_engine import TorchEngine
from tgen.errors import TrainingError, UsageError
from tgen.generation.loop import generate
from tgen.model.device import choose_device, n_threads, set_threads
from tgen.reports import DoneReport, EvalReport, PlanReport, RunReport, SampleReport, StepReport
from tgen.tokenizer import Tokenizer, make_tokenizer
from tgen.training import tensorboard
from tgen.training.loop import evaluation_is_due, train
from tgen.training.plan import Plan, choose_tokenizer, make_plan
from tgen.training.state import Progress, TrainState, new_state

_SAMPLE_TOKENS = 120


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the user asked for."""

    corpus: list[str] = field(default_factory=list)
    out: Path
    family: Family = DEFAULT_FAMILY
    size: Size | None = None  # None: the minutes choose
    tokenizer: str = "auto"  # char, bpe, or the path of a tokenizer.json
    vocab_size: int | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    overrides: dict[str, str] = field(default_factory=dict)
    overwrite: bool = False
    device: str = "auto"
    threads: int | None = None
    tensorboard: bool = False  # whether to write its events too


def start(
    request: RunRequest, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[RunReport]:
    """Trains a new model in `request.out`; `stopped` is asked after every step.

    Raises CorpusError, UsageError, TrainingError, LockedError.
    """
    began = time.monotonic()
    device = choose_device(request.device)
    set_threads(request.threads)
    if request.tensorboard:
        tensorboard.require()
    _check_free(request)
    text = corpus.read(request.corpus)
    train_documents, held_out, cut = corpus.split(text, request.train.val_fraction)
    notes = [f"skipped {name}: it does not look like text" for name in text.skipped]
    if not held_out or not train_documents:
        train_documents, held_out = train_documents or held_out, []
        notes.append("nothing is held out: the last weights are kept, not the best")
    texts = [part for document in train_documents for part in document]
    kind = request.tokenizer if request.tokenizer != "auto" else choose_tokenizer(text.n_bytes)
    tokenizer = make_tokenizer(kind, texts, vocab_size=request.vocab_size)
    train_tokens = corpus.tokenise(train_documents, tokenizer, open_end=cut)
    held_out_tokens = corpus.tokenise(held_out, tokenizer)
    plan = make_plan(
        family=request.family,
        size=request.size,
        train=request.train,
        overrides=request.overrides,
        vocab_size=tokenizer.vocab_size,
        train_tokens=len(train_tokens),
        held_out_tokens=len(held_out_tokens),
        on_gpu=device.type != "cpu",
    )
    run = {
        "corpus": request.corpus,
        "corpus_sha256": text.sha256,
        "corpus_bytes": text.n_bytes,
        "held_out_bytes": sum(len(part) for document in held_out for part in document),
        "tokenizer": kind,
        "size": plan.size,
        "model": asdict(plan.model),
        "train": asdict(plan.train),
        "device": device.type,
        "threads": n_threads(),
        "tensorboard": request.tensorboard,
        "sample_prompt": _sample_prompt(held_out or train_documents).decode(
            "utf-8", "surrogateescape"
        ),
    }
    run_folder = run_state.folder(request.out)
    with files.lock(run_folder / "LOCK"), run_log.RunLog(request.out) as log:
        _check_free(request)
        state = new_state(plan.model, plan.train, device)
        run_state.remove(request.out)  # an old model stays until there is a new one
        files.publish(run_folder / "tokenizer.json", tokenizer.json.encode())
        run_state.save_run(request.out, run, {"train": train_tokens, "held_out": held_out_tokens})
        state.progress.seconds = state.progress.setup_seconds = time.monotonic() - began
        report = _plan_report(
            request.out, run, plan, state, tokenizer, len(train_tokens), len(held_out_tokens), notes
        )
        yield log.add(report)
        store = _store(run, plan, train_tokens, held_out_tokens)
        reports = _run(request.out, run, tokenizer, store, plan.train, state, log, stopped)
        if request.tensorboard:
            reports = tensorboard.recorded(reports, run_folder / "tensorboard", after_step=0)
        yield from reports


def resume(
    out: Path,
    *,
    corpus_paths: list[str] | None = None,
    device: str = "auto",
    threads: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RunReport]:
    """Goes on with the run in `out`, exactly as if it had never stopped.

    The corpus need not be there any more; if it is named and has changed, TrainingError.
    """
    run, tokens = run_state.load_run(out)
    chosen = choose_device(run["device"] if device == "auto" else device)
    set_threads(threads or run["threads"])
    if run.get("tensorboard"):
        tensorboard.require()
    if corpus_paths and corpus.read(corpus_paths).sha256 != run["corpus_sha256"]:
        raise TrainingError(
            f"the corpus has changed since the run in {out} began",
            "start a new run with another --out, or resume without naming a corpus",
        )
    with files.lock(run_state.folder(out) / "LOCK"), run_log.RunLog(out) as log:
        for folder in (out, run_state.folder(out)):
            files.remove_leftovers(folder)
        tokenizer = Tokenizer(files.read(run_state.folder(out) / "tokenizer.json").decode())
        plan = Plan(run["size"], ModelConfig(**run["model"]), TrainConfig(**run["train"]))
        state = new_state(plan.model, plan.train, chosen)
        saved = run_state.load_state(out)
        if saved:
            state.restore(saved[1], Progress(**saved[0]))
        log.trim(state.progress.step)
        store = _store(run, plan, tokens["train"], tokens["held_out"])
        report = _plan_report(
            out, run, plan, state, tokenizer, len(tokens["train"]), len(tokens["held_out"]), []
        )
        yield log.add(report)
        folder, step = run_state.folder(out) / "tensorboard", state.progress.step
        reports = _run(out, run, tokenizer, store, plan.train, state, log, stopped)
        if run.get("tensorboard"):
            reports = tensorboard.recorded(reports, folder, after_step=step)
        yield from reports


def _run(
    out: Path,
    run: dict[str, Any],
    tokenizer: Tokenizer,
    store: corpus.TokenStore,
    config: TrainConfig,
    state: TrainState,
    log: run_log.RunLog,
    stopped: Callable[[], bool],
) -> Iterator[RunReport]:
    """Trains, saves, samples; hands on every report."""
    model, progress = state.model, state.progress

    def save(*, weights: bool) -> None:
        if weights:  # first, so that a run killed in between comes past this step again
            directory.save(out, model.config, tokenizer, model.to_arrays())
        log.flush()  # a state is never ahead of its log
        run_state.save_state(out, asdict(progress), state.to_arrays())

    for report in train(model, store, config, state):
        nothing_held_out = store.held_out_bytes == 0
        if isinstance(report, DoneReport):
            save(weights=nothing_held_out)
            yield log.add(replace(report, out=str(out)))
            return
        log.add(report)
        due = evaluation_is_due(progress, config)
        if isinstance(report, EvalReport):
            save(weights=report.best)
        elif due and nothing_held_out:
            save(weights=True)
        yield report
        if isinstance(report, StepReport) and due and not nothing_held_out:
            continue  # its evaluation comes first: a state is saved after it, not between
        if due:
            yield from map(log.add, _sample(run, tokenizer, state))
        if stopped():
            # Better an early model than none.
            save(weights=nothing_held_out or not (out / "config.json").exists())
            done = DoneReport(
                step=progress.step,
                finished=False,
                best_step=progress.best_step,
                best_bits_per_byte=progress.best_bits_per_byte,
                seconds=progress.seconds,
                tokens=progress.step * config.batch_size * store.context_length,
                out=str(out),
            )
            yield log.add(done)
            return


def _sample(run: dict[str, Any], tokenizer: Tokenizer, state: TrainState) -> Iterator[SampleReport]:
    prompt = run["sample_prompt"].encode("utf-8", "surrogateescape")
    ids = tokenizer.encode_prompt(prompt)[-state.model.config.context_length :]
    if not ids:  # a foreign tokenizer without an end of text, and nothing to start from
        return
    tokens = generate(
        TorchEngine(state.model),
        [ids],
        max_new_tokens=_SAMPLE_TOKENS,
        stop=[] if tokenizer.end_of_text is None else [tokenizer.end_of_text],
        sampling=SamplingConfig(seed=state.progress.step),
    )
    text = tokenizer.decode(token.id for token in tokens)
    yield SampleReport(step=state.progress.step, prompt=prompt, text=text)


def _sample_prompt(documents: list[corpus.Document]) -> bytes:
    """The beginning of a document: its first words, or the prompt of a row."""
    first = documents[0][0]
    words = first[:24].rsplit(None, 1)
    return words[0] if len(documents[0]) == 1 and words else first


def _check_free(request: RunRequest) -> None:
    """Nothing that is already there is lost unless that was asked for."""
    out = request.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", "give a directory that does not exist yet")
    entries = {entry.name for entry in out.iterdir()} if out.exists() else set()
    begun = run_state.folder(out) / "run.json"
    if not entries or (entries == {"training"} and not begun.exists()):
        return
    if "config.json" not in entries and not begun.exists():
        raise UsageError(
            f"--out {out} holds other files", "give a directory that does not exist yet"
        )
    if not request.overwrite:
        raise UsageError(
            f"{out} already holds a model",
            "add --resume to go on with it, --overwrite to start anew, or --out for another place",
        )


def _store(run: dict[str, Any], plan: Plan, train_tokens: Any, held_out: Any) -> corpus.TokenStore:
    return corpus.TokenStore(
        train=train_tokens,
        held_out=held_out,
        held_out_bytes=run["held_out_bytes"],
        context_length=plan.model.context_length,
        batch_size=plan.train.batch_size,
        seed=plan.train.seed,
    )


def _plan_report(
    out: Path,
    run: dict[str, Any],
    plan: Plan,
    state: TrainState,
    tokenizer: Tokenizer,
    n_train: int,
    n_held_out: int,
    notes: list[str],
) -> PlanReport:
    model = plan.model
    return PlanReport(
        out=str(out),
        resumed_at_step=state.progress.step,
        corpus_bytes=run["corpus_bytes"],
        train_tokens=n_train,
        held_out_tokens=n_held_out,
        tokenizer=run["tokenizer"],
        vocab_size=tokenizer.vocab_size,
        family=model.family,
        size=plan.size,
        n_parameters=sum(p.numel() for p in state.model.parameters()),
        context_length=model.context_length,
        shape={name: getattr(model, name) for name in ("n_layers", "d_model", "n_heads", "d_ff")},
        batch_size=plan.train.batch_size,
        learning_rate=plan.train.learning_rate,
        minutes=None if plan.train.steps else plan.train.minutes,
        steps=plan.train.steps,
        device=str(state.model.token_embedding.weight.device),
        threads=n_threads(),
        seed=plan.train.seed,
        notes=notes + plan.notes,
    )
