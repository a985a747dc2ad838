"""A model and its engine, ready to generate, shared by the command line and `tgen.python_api`."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tgen.checkpoint import model_dir, prompt_cache
from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.model_dir import ModelBundle, digest, kernels_dtype, load_ngrams
from tgen.checkpoint.stored_models import is_adapter
from tgen.config import DEFAULT_ENGINE, Draft, EngineOptions, SamplingConfig, raw
from tgen.engine.base import Engine, Logits, PromptCache, common_prefix_length
from tgen.engine.open_engine import find_cached, open_engine, prepare_store
from tgen.errors import ModelError, UsageError, suggest
from tgen.generation.logprobs import TokenLogprobs, TokenScores, score_prompt, score_stream
from tgen.generation.loop import (
    Drafter,
    ErrorHandler,
    RequestSource,
    compute_prompt_cache,
    generate_requests,
    make_source,
)
from tgen.generation.ngram_drafter import NgramDrafter, NgramTable
from tgen.generation.random_numbers import row_seed
from tgen.generation.sequence import Request, check_request, named_tokens
from tgen.generation.vocabulary import Vocabulary
from tgen.lora.model_with_adapter import load as load_bundle
from tgen.reports.generation import Token
from tgen.reports.number_format import format_bytes
from tgen.tokenizer import TextStream, TokenBytes, Tokenizer

if TYPE_CHECKING:
    from tgen.chat.encode import ChatFormat


def open_model(
    path: Path, options: EngineOptions = DEFAULT_ENGINE, *, adapter: Path | None = None
) -> "LoadedModel":
    """Load a model directory or GGUF file, with an adapter merged into it if one is named.

    Packed weights come from the cache, or are stored there after the first text. Raises ModelError
    or TokenizerError.
    """
    cached = None if adapter or is_adapter(path) else find_cached(path, options)
    if cached:
        tied = cached.tied_embeddings
        bundle = model_dir.load(path, with_weights=False, tied_embeddings=tied)
        if bundle.stamp == cached.stamp:  # the model has not changed meanwhile
            packed = cached.map(bundle.config)
            return LoadedModel(bundle, open_engine(bundle, options, packed=packed), options)
    bundle = load_bundle(path, adapter=adapter)
    n_weights, stored = sum(a.size for a in bundle.arrays.values()), kernels_dtype(bundle)
    engine = open_engine(bundle, options)
    bundle = replace(bundle, arrays={})  # the engine has them now, perhaps in fewer bits
    store, is_default = None, options.dtype in (None, stored)
    if bundle.adapter is None:
        store = prepare_store(bundle, engine, n_weights=n_weights, is_default=is_default)
    return LoadedModel(bundle, engine, options, store)


def make_vocabulary(bundle: ModelBundle) -> Vocabulary:
    """Return the vocabulary of a model, for generation."""
    tokenizer = bundle.tokenizer
    encode = partial(tokenizer.encode, continuation=True)
    return Vocabulary(TokenBytes(tokenizer), bundle.end_ids, encode, tokenizer.unused_ids)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The options for computing tokens; they do not change the tokens."""

    kv_cache: bool = True  # False: compute each window again for every token, without drafts
    draft: Draft = "auto"
    prompt_cache: PromptCache | None = None  # of the start of the prompts


_SEARCHED_BYTES = 1e6  # of weights that a pass reads in the time of a search for drafts
_SEARCHES_PER_PASS = 2.5  # in the time of Python in a pass, which `continue_text` saves
_DEFAULT = Decoding()


class LoadedModel:
    """A model with the engine that computes it.

    Texts may be generated in several threads and interleaved: each text has its own engine
    with the same weights. `engine` is the engine that finished last; `after_text` is called after
    the first text.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        engine: Engine,
        options: EngineOptions = DEFAULT_ENGINE,
        after_text: Callable[[], None] | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.options = options
        # One engine is stored for the next text. No lock: the garbage collector may end a
        # generator, and so return its engine, at any point of any thread.
        self._idle: deque[Engine] = deque([engine], maxlen=1)
        self._followed: deque[tuple[Engine, list[int]]] = deque(maxlen=1)
        self._after_text = [after_text] if after_text else []
        self._draft_model: LoadedModel | None = None
        self._draft_cost = 0.0  # of its pass, relative to one of this model

    def draft_with(self, draft_model: "LoadedModel") -> None:
        """Let a smaller model draft tokens, which does not change the texts.

        Raises UsageError if the two models do not have the same tokens, or it is not smaller.
        """
        tokens, others = self.tokenizer, draft_model.tokenizer
        sizes = draft_model.engine.weight_bytes, self.engine.weight_bytes
        reason = ""
        if (tokens.vocab_size, tokens.token_ids) != (others.vocab_size, others.token_ids):
            reason = f"its tokens are not those of {self.bundle.named_path}"
        elif sizes[0] >= sizes[1]:
            values = "got {} of weights, expected less than {}".format(*map(format_bytes, sizes))
            reason = f"is not smaller than {self.bundle.named_path} ({values})"
        if reason:
            message = f"--draft-model {draft_model.bundle.named_path}: {reason}"
            raise UsageError(message, "name a smaller model with the same tokenizer")
        self._draft_model = draft_model
        self._draft_cost = sizes[0] / sizes[1]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.bundle.tokenizer

    @cached_property
    def ngrams(self) -> list[NgramTable]:
        """N-grams of the training corpus, by `corpus.ngram_tables`; empty if there are none."""
        vocab_size = self.bundle.config.vocab_size
        tables = load_ngrams(self.bundle.path, vocab_size)
        return [NgramTable(rows, vocab_size) for rows in tables.values()]

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Fields of SamplingConfig that the model's generation_config.json sets."""
        return generation_config.read(self.bundle.settings_path).sampling

    def sampling(self, options: Mapping[str, Any]) -> SamplingConfig:
        """Return the configuration of `options`, else the model's defaults, else tgen's.

        Raises UsageError for unknown options and impossible values.
        """
        known = SamplingConfig.__dataclass_fields__
        if unknown := sorted(options.keys() - known.keys()):
            hint = "call help(tgen.SamplingConfig) to list the options"
            raise UsageError(f"unknown option {unknown[0]}", suggest(unknown[0], known) or hint)
        return SamplingConfig(**self.defaults | dict(options))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, and which tokens end a text."""
        return make_vocabulary(self.bundle)

    @cached_property
    def chat_format(self) -> "ChatFormat":
        """The chat template with the tokenizer; raises ModelError without a template."""
        from tgen.chat.encode import ChatFormat
        from tgen.checkpoint.chat_template import read_chat_template

        length = self.engine.context_length
        return ChatFormat(read_chat_template(self.bundle.settings_path), self.tokenizer, length)

    def encode(self, text: str | bytes) -> list[int]:
        """Return the token ids of a prompt; an empty one starts where documents start."""
        try:
            ids = self.tokenizer.encode_prompt(raw(text))
        except UnicodeEncodeError:
            raise UsageError("the prompt contains an unpaired surrogate", "pass bytes") from None
        if not ids:
            raise UsageError("the prompt is empty", "pass at least one character to this model")
        return ids

    def request(
        self, prompt: Sequence[int], sampling: SamplingConfig, ends: frozenset[int] = frozenset()
    ) -> Request:
        """Return a checked request; raises UsageError if it cannot be fulfilled.

        Its tokens are described if the sampling settings ask for log-probabilities or explanations.
        """
        ends |= named_tokens(sampling.stop, self.tokenizer.control_tokens)
        request = Request(prompt, sampling, ends, bool(sampling.logprobs or sampling.explain))
        check_request(request, self.vocabulary, self.engine.context_length)
        return request

    def chat_request(
        self, messages: Sequence[Mapping[str, str]], sampling: SamplingConfig
    ) -> Request:
        """Return the request for the next answer of a conversation.

        Raises UsageError and ModelError as `ChatFormat.encode` and `request` do.
        """
        return self.request(self.chat_format.encode(messages), sampling, self.chat_format.end_ids)

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingConfig | None = None,
        batch_size: int | None = None,
        decoding: Decoding = _DEFAULT,
    ) -> Iterator[Token]:
        """Yield the tokens that continue each prompt, `batch_size` or all prompts at a time.

        Prompt i samples with the seed `row_seed(sampling.seed, i)`.
        """
        config = sampling or self.sampling({})
        requests = [
            self.request(ids, config.with_seed(row_seed(config.seed, row)))
            for row, ids in enumerate(prompts)
        ]
        yield from self.complete(
            make_source(requests), batch_size=batch_size or len(prompts), decoding=decoding
        )

    def complete(
        self,
        source: RequestSource,
        *,
        batch_size: int,
        decoding: Decoding = _DEFAULT,
        cancelled: Callable[[], Collection[int]] = tuple,
        on_error: ErrorHandler | None = None,
    ) -> Iterator[Token]:
        """Yield the tokens of requests as they are sampled, up to `batch_size` requests per batch.

        For `cancelled` and `on_error` see `generation.loop.generate_requests`.
        """
        with self.borrow_engine() as engine, self._open_drafter(decoding) as drafts:
            yield from generate_requests(
                engine,
                source,
                batch_size=batch_size,
                vocabulary=self.vocabulary,
                kv_cache=decoding.kv_cache,
                drafts=drafts,
                prompt_cache=decoding.prompt_cache,
                cancelled=cancelled,
                on_error=on_error,
            )

    @contextmanager
    def _open_drafter(self, decoding: Decoding) -> Iterator[Drafter | None]:
        if decoding.draft == "off" or not decoding.kv_cache:
            yield None
        elif self._draft_model is None:
            cost = _SEARCHED_BYTES / self.engine.weight_bytes
            pass_cost = _SEARCHES_PER_PASS * cost if self.engine.name == "kernels" else 0.0
            yield NgramDrafter(self.ngrams, search_cost=cost, pass_cost=pass_cost)
        else:
            from tgen.generation.model_drafter import ModelDrafter

            with self._draft_model.borrow_engine() as engine:
                yield ModelDrafter(engine, self.vocabulary, relative_cost=self._draft_cost)

    @contextmanager
    def borrow_engine(self) -> Iterator[Engine]:
        """Yield an engine that no other text uses."""
        try:
            engine = self._idle.pop()
        except IndexError:
            engine = self.engine.clone()
        try:
            yield engine
            self.engine = engine
            with suppress(IndexError):  # not the first text
                self._after_text.pop()()
        finally:
            self._idle.append(engine)

    def next_logits(self, ids: Sequence[int]) -> Logits:
        """Return the logits (1, V) after a text of at least one token that fits the context.

        Only what differs from the text of the last call is computed. Raises ModelError if the
        memory has no room.
        """
        try:
            engine, known = self._followed.pop()
        except IndexError:
            engine, known = self.engine.clone(), []
        n_known = min(common_prefix_length(known, ids), len(ids) - 1)
        engine.rewind([n_known])
        engine.check_room([len(ids)])
        logits = engine.extend([ids[n_known:]])
        self._followed.append((engine, list(ids)))
        return logits

    def pieces(self, tokens: Iterable[Token]) -> Iterator[tuple[Token, bytes]]:
        """Yield each token of one sequence with the whole characters that it completes."""
        stream = TextStream()
        for token in tokens:
            piece = stream.feed(token.text)
            yield token, piece + (stream.flush() if token.last else b"")

    def cache_prompt(
        self, prompt: Sequence[int], *, known: PromptCache | None = None
    ) -> PromptCache:
        """Compute the KV cache of a prompt; its beginning is taken from `known` where they agree.

        Raises UsageError if the prompt is longer than the context.
        """
        with self.borrow_engine() as engine:
            return compute_prompt_cache(engine, prompt, known)._replace(model=self._origin)

    def check_cache(self, cache: PromptCache) -> None:
        """Raise ModelError for a prompt cache that another model or dtype computed."""
        hint = "compute a new one with cache_prompt"
        if cache.model is None:
            raise ModelError("the prompt cache does not name its model", hint)
        shapes = [(len(cache.tokens),), cache.keys.shape, cache.values.shape]
        config, origin = self.bundle.config, self._origin
        prompt_cache.check_origin("the prompt cache", cache.model, shapes, config, origin, hint)

    def why_unused(self, cache: PromptCache, prompt: Sequence[int]) -> str:
        """Return why a prompt takes nothing from a prompt cache; "" if it does."""
        if len(prompt) > self.engine.context_length:
            return "the prompt is longer than the context"
        n_common = common_prefix_length(prompt, cache.tokens)
        return "" if n_common else "the cached prompt starts differently"

    def save_cache(self, path: Path, cache: PromptCache) -> None:
        """Write the KV cache of a prompt to a file, bound to this model and dtype.

        Raises ModelError as `check_cache` does, UsageError as `check_cache_file` does.
        """
        prompt_cache.check_cache_file(path, name="path")
        self.check_cache(cache)
        arrays = {"keys": cache.keys, "values": cache.values}
        arrays["tokens"] = np.array(cache.tokens, np.int64)
        prompt_cache.save(path, arrays, self._identity)

    def load_cache(self, path: Path) -> PromptCache:
        """Read what `save_cache` wrote; raises ModelError if it belongs to another model."""
        arrays = prompt_cache.load(path, self.bundle.config, self._identity)
        tokens = arrays["tokens"].tolist()
        return PromptCache(tokens, arrays["keys"], arrays["values"], self._origin)

    @property
    def _origin(self) -> prompt_cache.ModelIdentity:
        """The identity in memory: unlike `_identity`, it does not take reading all weights."""
        stamp, path = " ".join(map(str, self.bundle.stamp)), self.bundle.named_path
        return prompt_cache.ModelIdentity(stamp, path, self.engine.dtype, self.engine.cache_dtype)

    @cached_property
    def _identity(self) -> prompt_cache.ModelIdentity:
        engine = self.engine
        return prompt_cache.ModelIdentity(
            digest(self.bundle), self.bundle.path, engine.dtype, engine.cache_dtype
        )

    def score(
        self, ids: Iterable[Sequence[int]], *, stride: int | None = None
    ) -> Iterator[TokenScores]:
        """Yield the scores of all tokens after the first of a text, see `score_stream`."""
        with self.borrow_engine() as engine:
            yield from score_stream(engine, ids, stride=stride)

    def score_prompt(self, prompt: Sequence[int], n_top: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of a prompt's tokens, see `logprobs.score_prompt`."""
        with self.borrow_engine() as engine:
            return score_prompt(engine, prompt, n_top)
