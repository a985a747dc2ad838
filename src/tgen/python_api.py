"""tgen as a library: load a model and generate, or train one.

import tgen
model = tgen.load("models/shakespeare")
print(model.generate("What is", temperature=0))
for report in tgen.train("corpus.txt", minutes=1): ...
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from tgen.checkpoint import model_dir
from tgen.checkpoint.dtypes import to_float32
from tgen.checkpoint.hf.tensor_names import full_name, head_name, to_hf_arrays
from tgen.checkpoint.model_lookup import find_model
from tgen.config import (
    DEFAULT_BATCH_SIZE,
    CacheDtype,
    Device,
    EngineOptions,
    ModelConfig,
    SamplingConfig,
    StoredAs,
    raw,
)
from tgen.config.input_files import Reading
from tgen.config.option import check_combinations, check_ranges, require
from tgen.config.training import TrainConfig
from tgen.engine.base import PromptCache
from tgen.errors import UsageError, suggest
from tgen.generation.loop import make_source
from tgen.generation.random_numbers import row_seed
from tgen.loaded_model import Decoding, LoadedModel, open_model
from tgen.lora import model_with_adapter
from tgen.python_errors import named_keywords
from tgen.reports.generation import Text, TextDetails, Token
from tgen.reports.training import RunReport
from tgen.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tgen.drawing.inspection import Inspection

Prompt = str | bytes | Sequence[int]  # a text, or token ids


def _warn(message: str) -> None:
    """Warn about the line that called tgen."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@named_keywords()
def load(
    path: str | Path | None = None,
    *,
    adapter: str | Path | None = None,
    device: Device = "auto",
    threads: int | None = None,
    dtype: StoredAs | None = None,
    cache_dtype: CacheDtype | None = None,
    draft_model: str | Path | None = None,
) -> "Model":
    """Load a model by path or name, as `--model` does; the default is that of the commands.

    `adapter` is the directory of a LoRA adapter; without `path`, its base model is loaded.
    `dtype` is the data type of the weights in memory, `cache_dtype` that of keys and values on a
    CPU. `draft_model` is a smaller model with the same tokenizer that drafts tokens: texts are the
    same. Raises UsageError, ModelError or TokenizerError.
    """
    options = EngineOptions(device=device, threads=threads, dtype=dtype, cache_dtype=cache_dtype)
    a_model = "a path or the name of a model"
    expected = {"path": a_model, "adapter": "the directory of an adapter", "draft_model": a_model}
    for name, value in (("path", path), ("adapter", adapter), ("draft_model", draft_model)):
        valid = value is None or isinstance(value, (str, Path))
        require(valid, name, repr(value), expected[name])
    if path is None and adapter is not None:
        path, adapter = Path(adapter), None
    adapter = None if adapter is None else Path(adapter)
    loaded = open_model(_location(path), options, adapter=adapter)
    named = loaded.bundle
    # Files are read again when they are needed, wherever the program has changed its directory to.
    absolute = named.adapter and named.adapter.absolute()
    loaded.bundle = replace(named, path=named.path.absolute(), adapter=absolute)
    if draft_model is not None:
        loaded.draft_with(open_model(_location(draft_model), options))
    for warning in loaded.bundle.warnings:
        _warn(warning)
    return Model(loaded, path=named.path, adapter=named.adapter)


def _location(model: str | Path | None) -> Path:
    return model if isinstance(model, Path) else find_model(model).path


@named_keywords()
def train(
    corpus: str | Path | Iterable[str | Path] = (),
    *,
    out: str | Path,
    resume: bool = False,
    override: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Iterator[RunReport]:
    """Train a model on text files and yield reports: the plan, steps, evaluations, the end.

    `options` are fields of `RunRequest` (size, family, tokenizer, ...), `Reading`, `TrainConfig`
    and `ModelConfig`. `stopped` is called after every step; once true, the run saves and stops.
    With `resume`, the run in `out` continues; corpus and options may differ from the run's own
    only with `override`. Raises CorpusError, UsageError, TrainingError and LockedError.
    """
    from tgen import runs
    from tgen.runs import ResumeRequest, RunRequest

    valid = isinstance(corpus, (Path, Iterable)) and not isinstance(corpus, bytes)
    require(valid, "corpus", repr(corpus), "a path or a list of paths")
    paths = [corpus] if isinstance(corpus, (str, Path)) else list(corpus)
    for path in paths:
        require(isinstance(path, (str, Path)), "corpus", repr(path), "a path or a list of paths")
    _check_path("out", out)
    require(callable(stopped), "stopped", repr(stopped), "a function without arguments")
    request: dict[str, Any] = {"corpus": [str(path) for path in paths], "out": Path(out)}
    config, shape, reading = {}, {}, {}
    if {"steps", "minutes"} <= set(options):
        raise UsageError("minutes cannot be combined with steps", "remove one of them")
    # Estimates for other machines are made by the command line's --dry-run alone.
    of_run = {one.name for one in fields(RunRequest) if one.metadata.get("needs") != "dry_run"}
    of_run -= {"train", "reading", "began", "command"}  # made here, or by the command line
    for name, value in options.items():
        if name in of_run:
            request[name] = value
        elif name in Reading.__dataclass_fields__:
            reading[name] = value
        elif name in TrainConfig.__dataclass_fields__:
            config[name] = value
        elif name in ModelConfig.__dataclass_fields__:
            shape[name] = str(value)
        else:
            known = [*of_run, *Reading.__annotations__]
            known += [*TrainConfig.__annotations__, *ModelConfig.__annotations__]
            hint = "pass a field of TrainConfig or ModelConfig, or an option of tgen train"
            raise UsageError(f"unknown option {name}", suggest(name, known) or hint)
    request["overrides"] = {**request.get("overrides", {}), **shape}
    given = {
        one.name: one.metadata
        for one in (*fields(RunRequest), *fields(Reading), *fields(TrainConfig))
        if options.get(one.name, one.default) not in (one.default, None)
    }
    valued: dict[str, dict[str, Any]] = {f"{name}={value}": {} for name, value in options.items()}
    check_combinations(given | valued | ({"resume": {}} if resume else {}))
    if resume:
        if fixed := request.keys() - ResumeRequest.__dataclass_fields__.keys():
            raise UsageError(f"{min(fixed)} cannot be combined with resume", "remove it")
        resumed = ResumeRequest(**request, settings=config, reading=reading, override=override)
        return _reports(runs.resume(resumed, stopped=stopped))
    if override:
        raise UsageError("override needs resume", "pass resume=True")
    if not request["corpus"] and request.get("from_run") is None:
        raise UsageError("no corpus", "pass a corpus, or resume=True")
    started = RunRequest(train=TrainConfig(**config), reading=Reading(**reading), **request)
    return _reports(runs.start(started, stopped=stopped))


def _reports(reports: Iterator[RunReport]) -> Iterator[RunReport]:
    with named_keywords():
        yield from reports


class Stream(TextDetails, Iterator[str]):
    """The pieces of a text as it is generated, each a str of whole characters.

    Its `TextDetails` grow with it; `finish_reason` is None until the text has ended.
    """

    def __init__(self, sampling: SamplingConfig, pieces: Iterator[tuple[Token, bytes]]) -> None:
        self.start(sampling)
        self._pieces = pieces

    def __next__(self) -> str:
        with named_keywords():
            for token, piece in self._pieces:
                self.add(token)
                if piece:
                    return piece.decode("utf-8", errors="replace")
        raise StopIteration

    def close(self) -> None:
        """End the text here and free its KV cache."""
        self._pieces = iter(())


class Model:
    """A loaded model. Text may be str or bytes; bytes that are not UTF-8 come back as U+FFFD.

    It may be used from several threads, and streams may be interleaved: no text depends on the
    others. Each open stream has its own KV cache. A `with` block closes the model at its end.
    """

    def __init__(
        self, loaded: LoadedModel, *, path: Path | None = None, adapter: Path | None = None
    ) -> None:
        """`path` and `adapter` are shown in place of those of `loaded`."""
        self._opened: LoadedModel | None = loaded
        self._path, self._adapter = path or loaded.bundle.path, adapter or loaded.bundle.adapter

    @property
    def _loaded(self) -> LoadedModel:
        if self._opened is None:
            raise UsageError("the model is closed", "load it again with tgen.load")
        return self._opened

    def close(self) -> None:
        """Free the weights, once open streams have ended; the model cannot be used afterwards."""
        self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the model's path, shape and dtypes."""
        if self._opened is None:
            return "<tgen.Model, closed>"
        config, engine = self.config, self._opened.engine
        adapter = f" with adapter {str(self._adapter)!r}" if self._adapter else ""
        return (
            f"<tgen.Model {str(self.path)!r}{adapter}: {config.family}, layers: {config.n_layers}, "
            f"d_model: {config.d_model}, vocabulary: {config.vocab_size:,}, "
            f"context: {config.context_length:,}, weights: {engine.dtype}, "
            f"KV cache: {engine.cache_dtype}>"
        )

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a tgen.Model cannot be pickled or copied: pass its path, and load it there with "
            "tgen.load"
        )

    @property
    def path(self) -> Path:
        """The path that the model was loaded from."""
        _ = self._loaded  # an error if the model is closed
        return self._path

    @property
    def config(self) -> ModelConfig:
        """The model's shape and family."""
        return self._loaded.bundle.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @named_keywords()
    def encode(self, text: str | bytes) -> list[int]:
        """Return the token ids of a prompt."""
        _check_text("prompt", text)
        return self._loaded.encode(text)

    def generate(self, prompt: Prompt = "", **options: Any) -> Text:
        """Return the continuation of a prompt; options as in `stream`."""
        return _join(self.stream(prompt, **options))

    @named_keywords()
    def stream(
        self, prompt: Prompt = "", *, prompt_cache: PromptCache | None = None, **options: Any
    ) -> Stream:
        """Return an iterator over the continuation, in pieces of whole characters.

        `options` are the fields of `SamplingConfig`; `prompt_cache` comes from `cache_prompt` of
        this model. Raises UsageError and ModelError, also while the text is generated.
        """
        sampling = self._sampling(options)
        ids = self._prompt_ids(prompt)
        if prompt_cache is not None:
            _check_type(prompt_cache)
            self._loaded.check_cache(prompt_cache)
            if reason := self._loaded.why_unused(prompt_cache, ids):
                _warn(f"prompt_cache is not used: {reason}")
        decoding = Decoding(prompt_cache=prompt_cache)
        tokens = self._loaded.tokens([ids], sampling=sampling, decoding=decoding)
        return Stream(sampling, self._loaded.pieces(tokens))

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Text:
        """Return the answer to messages, each with a `role` and a `content`.

        The model's chat template formats them; a message never becomes a control token.
        """
        return _join(self.stream_chat(messages, **options))

    @named_keywords()
    def stream_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Stream:
        """Return an iterator over the answer, in pieces of whole characters."""
        sampling = self._sampling(options)
        request = self._loaded.chat_request(messages, sampling)
        tokens = self._loaded.complete(make_source([request]), batch_size=1)
        return Stream(sampling, self._loaded.pieces(tokens))

    @named_keywords()
    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = DEFAULT_BATCH_SIZE, **options: Any
    ) -> list[Text]:
        """Return each prompt's continuation, `batch_size` of them computed together.

        The first text is what `generate` returns; row i samples with a seed made from `seed` and i.
        """
        sampling = self._sampling(options)
        valid = isinstance(prompts, Iterable) and not isinstance(prompts, (str, bytes))
        require(valid, "prompts", repr(prompts), "a list of texts")
        valid = _is_whole(batch_size) and batch_size >= 1
        require(valid, "batch_size", repr(batch_size), "a number of at least 1")
        ids = [self._prompt_ids(prompt) for prompt in prompts]
        texts = [bytearray() for _ in ids]
        details = [
            TextDetails().start(sampling.with_seed(row_seed(sampling.seed, row)))
            for row in range(len(ids))
        ]
        for token in self._loaded.tokens(ids, sampling=sampling, batch_size=batch_size):
            texts[token.sequence] += token.text
            details[token.sequence].add(token)
        return [
            Text(text.decode("utf-8", errors="replace"), detail)
            for text, detail in zip(texts, details, strict=True)
        ]

    @named_keywords()
    def score(self, text: str | bytes, *, stride: int | None = None) -> float:
        """Return the bits per byte of a text, as `tgen score`: lower means better predicted.

        The first token follows a beginning-of-text or end-of-text token, if the model has one. In
        texts longer than the context, the window moves by `stride` tokens (None: half a context).
        """
        from tgen.scoring import score_text

        _check_text("text", text)
        context_length = self._loaded.engine.context_length
        valid = stride is None or (_is_whole(stride) and 1 <= stride <= context_length)
        require(valid, "stride", repr(stride), f"a number from 1 to {context_length:,}")
        given = _to_bytes("text", text)
        bits_per_byte = score_text(self._loaded, given, stride=stride).bits_per_byte
        if bits_per_byte is None:
            raise UsageError("no text to score", "pass more than one token to this model")
        return bits_per_byte

    @named_keywords()
    def inspect(
        self,
        text: str | bytes | None = None,
        *,
        view: str = "attention",
        tail: bool = False,
        **options: Any,
    ) -> "Inspection":
        """Return a view of a text, which a notebook shows; `.data` has its numbers.

        The views are those of `tgen inspect`, except for `training`; `attention` is the page of all
        heads. `positions` and `model` need no text. The options are those of `tgen inspect`
        (layers and heads such as "0,2-4" or "-1"), and for `predict` those of `SamplingConfig`.
        Raises UsageError for an empty text, one longer than the context unless `tail`, and options
        without effect on the view.
        """
        from tgen.drawing.inspection import inspect_view
        from tgen.drawing.view_options import (
            SAMPLING_FIELDS,
            VIEWS_WITHOUT_TEXT,
            View,
            ViewOptions,
        )
        from tgen.inspection.inspector import Inspector

        names = [one.value for one in View if one is not View.training]
        require(view in names, "view", repr(view), f"one of {', '.join(names)}")
        needs_text = View(view) not in VIEWS_WITHOUT_TEXT
        if text is not None or needs_text:
            _check_text("text", text)
        require(isinstance(tail, bool), "tail", repr(tail), "True or False")
        sampling = {name: options.pop(name) for name in [*options] if name in SAMPLING_FIELDS}
        known = [one.name for one in fields(ViewOptions) if one.name != "sampling"]
        if unknown := sorted(set(options) - set(known)):
            hint = suggest(unknown[0], [*known, *SAMPLING_FIELDS])
            raise UsageError(f"unknown option {unknown[0]}", hint or f"use {', '.join(known)}")
        view_options = ViewOptions(**options, sampling=sampling)
        check_ranges(view_options)
        for name, value in options.items():
            if isinstance(value, str):
                _to_bytes(name, value, "remove it")
        given, output = None if text is None else _to_bytes("text", text), None
        bundle = model_with_adapter.reload(self._loaded.bundle)
        if given is not None and view == View.sources:  # of any length
            from tgen.drawing.views import sources_output
            from tgen.inspection.sources import PLACES, TOP, find_sources
            from tgen.runs.text_sources import open_training_text

            problems: list[str] = []
            index = open_training_text(bundle.named_path, problems.append)
            for problem in problems:
                _warn(problem)
            report = find_sources(index, given, top=view_options.top or TOP, places=PLACES)
            given, output = None, sources_output(report)
        inspector = Inspector(bundle, given, tail=tail)
        return inspect_view(inspector, View(view), view_options, output)

    @named_keywords()
    def activations(
        self,
        text: str | bytes,
        *,
        layer: str | None = None,
        parts: str | None = None,
        tail: bool = False,
    ) -> dict[str, Any]:
        """Return activations of a text as NumPy float32 arrays by name, as `tgen inspect
        --activations` writes them.

        `layer` has layers such as "0,2-4" or "-1", by default all; `parts` has names such as
        "residual,heads" or "all". Raises UsageError as `inspect` does.
        """
        from tgen.drawing.view_options import ViewOptions
        from tgen.inspection.inspector import Inspector

        _check_text("text", text)
        require(isinstance(tail, bool), "tail", repr(tail), "True or False")
        check_ranges(ViewOptions(layer=layer, parts=parts))
        given = _to_bytes("text", text)
        bundle = model_with_adapter.reload(self._loaded.bundle)
        return Inspector(bundle, given, tail=tail).activations(layer, parts)

    @named_keywords()
    def cache_prompt(self, prompt: Prompt) -> PromptCache:
        """Compute the KV cache of a prompt, for `generate(..., prompt_cache=...)`."""
        return self._loaded.cache_prompt(self._prompt_ids(prompt))

    @named_keywords()
    def save_cache(self, path: str | Path, cache: PromptCache) -> None:
        """Write the KV cache of a prompt to a file, bound to this model and dtype.

        Raises ModelError if another model or dtype computed it, UsageError if the path is a
        directory or a file that is not a prompt cache.
        """
        _check_type(cache)
        _check_path("path", path)
        self._loaded.save_cache(Path(path), cache)

    @named_keywords()
    def load_cache(self, path: str | Path) -> PromptCache:
        """Read what `save_cache` wrote; raises ModelError if it belongs to another model."""
        _check_path("path", path)
        return self._loaded.load_cache(Path(path))

    @named_keywords()
    def weights(self, kind: Literal["numpy", "torch"] = "numpy") -> dict[str, Any]:
        """Read all weights again, as float32 arrays or tensors by transformers' parameter names.

        Raises ModelError if the model has changed since it was loaded, UsageError for another kind.
        """
        if kind not in ("numpy", "torch"):
            raise UsageError(f"unknown kind of weights {kind!r}", "choose numpy or torch")
        arrays = model_with_adapter.reload(self._loaded.bundle).arrays
        wide = {name: to_float32(array) for name, array in arrays.items()}
        stored = {
            full_name(self.config, name): array
            for name, array in to_hf_arrays(self.config, wide).items()
        }
        if kind == "numpy":
            return stored
        import torch

        return {name: torch.from_numpy(array) for name, array in stored.items()}

    @named_keywords()
    def to_transformers(self) -> Any:
        """Return a transformers model in float32 on the CPU; raises UsageError without it."""
        if find_spec("transformers") is None:
            raise UsageError("transformers is not installed", "pip install transformers")
        from transformers import AutoConfig, AutoModelForCausalLM

        files = model_dir.build_metadata_files(self.config, self.tokenizer)
        config = AutoConfig.for_model(**json.loads(files["config.json"]))
        model: Any = AutoModelForCausalLM.from_config(config)
        tensors = self.weights("torch")
        head = tensors.pop(head_name(self.config), None)  # its name differs between versions
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected, unexpected
        assert len(missing) <= 1, missing
        if head is not None:
            model.get_output_embeddings().weight.data = head
        model.tie_weights()
        return model.eval()

    def _sampling(self, options: Mapping[str, Any]) -> SamplingConfig:
        """Return the configuration of options; `logprobs` may be True, which is 1, or False."""
        logprobs = options.get("logprobs")
        switch = {"logprobs": int(logprobs)} if isinstance(logprobs, bool) else {}
        return self._loaded.sampling({**options, **switch})

    def _prompt_ids(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt, which may have them already."""
        if isinstance(prompt, (str, bytes)):
            return self.encode(prompt)
        size = self.tokenizer.vocab_size
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array or tensor
        valid = isinstance(ids, Sequence) and not isinstance(prompt, (bytearray, memoryview))
        expected = f"a str, bytes or at least one token id from 0 to {size - 1:,}"
        require(valid and len(ids) > 0, "prompt", repr(prompt), expected)
        for i in ids:
            is_id = _is_whole(i) and 0 <= int(i) < size
            require(is_id, "prompt", repr(i), expected)
        return [int(i) for i in ids]


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, as NumPy's are, too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _join(stream: Stream) -> Text:
    return Text("".join(stream), stream)


def _check_type(cache: Any) -> None:
    valid = isinstance(cache, PromptCache)
    require(valid, "prompt_cache", repr(cache), "a result of cache_prompt or load_cache")


def _check_path(name: str, path: Any) -> None:
    require(isinstance(path, (str, Path)) and path != "", name, repr(path), "a path")


def _check_text(name: str, text: Any) -> None:
    require(isinstance(text, (str, bytes)), name, repr(text), "a str or bytes")


def _to_bytes(name: str, text: str | bytes, hint: str = "pass bytes") -> bytes:
    """Return the bytes of a text; raises UsageError for one with an unpaired surrogate."""
    try:
        return raw(text)
    except UnicodeEncodeError:
        raise UsageError(f"{name} contains an unpaired surrogate", hint) from None
