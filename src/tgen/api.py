"""tgen as a library: `load` a model, then generate or score.

from tgen import load
model = load("models/shakespeare")
for piece in model.generate("What is", temperature=0): print(piece, end="")
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from tgen import conversions
from tgen.checkpoint import model_dir, prompt_cache
from tgen.checkpoint.hf import generation_config
from tgen.checkpoint.model_dir import ModelBundle, digest
from tgen.checkpoint.model_lookup import find_model
from tgen.checkpoint.ngram_tables import load as load_ngrams
from tgen.config import (
    DEFAULT_BATCH_SIZE,
    Draft,
    SamplingConfig,
    SamplingOptions,
    StoredAs,
    raw,
)
from tgen.engine import open_engine
from tgen.engine.base import Engine, PromptCache
from tgen.errors import UsageError
from tgen.generation.loop import RequestSource, generate_rows, in_turn
from tgen.generation.ngram_drafter import NgramDrafter
from tgen.generation.prompt_cache import compute_prompt_cache
from tgen.generation.sampling import row_seed
from tgen.generation.score import total_nll
from tgen.generation.sequence import Request, check_request
from tgen.generation.token_bytes import Vocabulary
from tgen.reports import Token
from tgen.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from tgen.chat.format import ChatFormat


def load(
    path: str | Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    weights: StoredAs | None = None,
) -> "Model":
    """Opens a model directory, or the one that a name means, as `--model` does.

    Raises ModelError or TokenizerError if it cannot be used.
    """
    bundle = model_dir.load(find_model(path).path if isinstance(path, str) else path)
    engine = open_engine(bundle, device=device, threads=threads, weights=weights)
    return Model(replace(bundle, arrays={}), engine)  # the engine has them, perhaps in fewer bits


class Model:
    """A loaded model. Text may be str or bytes; what cannot be UTF-8 is bytes.

    One text is generated at a time: starting another ends the one before with a RuntimeError.
    """

    def __init__(self, bundle: ModelBundle, engine: Engine) -> None:
        self.bundle = bundle
        self.engine = engine
        self._turn = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""
        return self.bundle.tokenizer

    @cached_property
    def ngrams(self) -> Mapping[str, NDArray[Any]]:
        """What usually follows in the model's corpus, by `corpus.ngram_tables`; empty: unknown."""
        return load_ngrams(self.bundle.path, self.bundle.config.vocab_size)

    def encode(self, text: str | bytes) -> list[int]:
        """The ids of a prompt; an empty one starts where documents start."""
        try:
            ids = self.tokenizer.encode_prompt(raw(text))
        except UnicodeEncodeError:
            raise UsageError("the prompt has half of a surrogate pair", "give bytes") from None
        if not ids:
            raise UsageError("the prompt is empty", "this model needs at least one character")
        return ids

    @cached_property
    def defaults(self) -> SamplingOptions:
        """What the model's generation_config.json says where SamplingConfig says otherwise."""
        return generation_config.read(self.bundle.path).sampling

    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingConfig:
        """How its texts go on: `options`, else the model's own defaults, else SamplingConfig's."""
        merged = self.defaults.copy()
        merged.update(options)
        return SamplingConfig(**merged)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of the model's tokens, and which of them end a text."""
        size = self.tokenizer.vocab_size
        tokens = [self.tokenizer.token_bytes(i) for i in range(size)]
        encode = partial(self.tokenizer.encode, continues=True)
        return Vocabulary(tokens, self.bundle.end_ids, encode)

    @cached_property
    def chat_format(self) -> "ChatFormat":
        """How conversations are written; raises ModelError if the model has no chat template."""
        from tgen.chat.format import ChatFormat
        from tgen.chat.template import read as read_template

        length = self.engine.context_length
        return ChatFormat(read_template(self.bundle.path), self.tokenizer, length)

    def request(
        self, prompt: Sequence[int], sampling: SamplingConfig, ends: frozenset[int] = frozenset()
    ) -> Request:
        """A text to be continued. Raises UsageError where it cannot be as it is to be."""
        request = Request(prompt, sampling, ends)
        check_request(request, self.vocabulary, self.engine.context_length)
        return request

    def chat_request(
        self, messages: Sequence[Mapping[str, str]], sampling: SamplingConfig
    ) -> Request:
        """A conversation to be answered. Raises UsageError and ModelError as `ChatFormat.encode`
        and `request` do."""
        return self.request(self.chat_format.encode(messages), sampling, self.chat_format.ends)

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingConfig | None = None,
        n_rows: int | None = None,
        kv_cache: bool = True,
        draft: Draft = "auto",
        prompt_cache: PromptCache | None = None,
    ) -> Iterator[Token]:
        """The tokens that continue each prompt, `n_rows` or all together, with their probabilities.

        Row i draws by `row_seed(sampling.seed, i)`. With `draft` how the text goes on is guessed
        and checked, where that is faster.
        """
        config = sampling or self.sampling()
        seeds = (row_seed(config.seed, row) for row in range(len(prompts)))
        rows = zip(prompts, seeds, strict=True)
        asked = [self.request(ids, replace(config, seed=seed)) for ids, seed in rows]
        yield from self.rows(
            in_turn(asked),
            n_rows=n_rows or len(prompts),
            kv_cache=kv_cache,
            draft=draft,
            prompt_cache=prompt_cache,
        )

    def rows(
        self,
        waiting: RequestSource,
        *,
        n_rows: int,
        kv_cache: bool = True,
        draft: Draft = "auto",
        prompt_cache: PromptCache | None = None,
    ) -> Iterator[Token]:
        """The tokens of requests as they come, `n_rows` of them computed together."""
        self._turn += 1
        turn = self._turn
        drafts = None
        if draft == "auto" and kv_cache:
            drafts = NgramDrafter(self.ngrams, self.bundle.config.vocab_size)
        for token in generate_rows(
            self.engine,
            waiting,
            n_rows=n_rows,
            vocabulary=self.vocabulary,
            kv_cache=kv_cache,
            drafts=drafts,
            prompt_cache=prompt_cache,
        ):
            yield token
            if self._turn != turn:
                raise RuntimeError("another text was started on this model; load it twice for two")

    def pieces(self, tokens: Iterable[Token]) -> Iterator[tuple[Token, bytes]]:
        """Each token of one row with the whole characters that it completes."""
        stream = TextStream()
        for token in tokens:
            piece = stream.feed(token.text)
            yield token, piece + (stream.flush() if token.last else b"")

    def generate(
        self, prompt: str | bytes = "", **options: Unpack[SamplingOptions]
    ) -> Iterator[str]:
        """Pieces of text, whole characters each, as they come.

        `options` are the fields of SamplingConfig; what the model's generation_config.json says
        counts for those left away. Bytes that are no UTF-8 come as U+FFFD. Whether a text of a
        given form is complete the last Token of `tokens` says.
        """
        tokens = self.tokens([self.encode(prompt)], sampling=self.sampling(**options))
        return self._pieces_of(tokens)

    def _pieces_of(self, tokens: Iterable[Token]) -> Iterator[str]:
        pieces = (piece for _, piece in self.pieces(tokens) if piece)
        return (piece.decode("utf-8", errors="replace") for piece in pieces)

    def chat(
        self, messages: Sequence[Mapping[str, str]], **options: Unpack[SamplingOptions]
    ) -> Iterator[str]:
        """The answer to messages, each with a `role` and a `content`, by the chat template.

        Pieces and `options` as in `generate`. What a message spells is never a control token.
        """
        config = self.sampling(**options)
        config = replace(config, seed=row_seed(config.seed, 0))
        asked = [self.chat_request(messages, config)]
        return self._pieces_of(self.rows(in_turn(asked), n_rows=1))

    def generate_batch(
        self,
        prompts: Sequence[str | bytes],
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        **options: Unpack[SamplingOptions],
    ) -> list[str]:
        """Each prompt's continuation, `batch_size` of them computed together.

        Row i draws by `row_seed(seed, i)`, so that the first is what `generate` gives.
        """
        config = self.sampling(**options)
        if isinstance(prompts, (str, bytes)):
            raise UsageError("prompts is one text", "give a list of them")
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}", "it must be at least 1")
        ids, texts = [self.encode(prompt) for prompt in prompts], [b""] * len(prompts)
        for token in self.tokens(ids, sampling=config, n_rows=batch_size):
            texts[token.row] += token.text
        return [text.decode("utf-8", errors="replace") for text in texts]

    def cache_prompt(
        self, prompt: Sequence[int], *, known: PromptCache | None = None
    ) -> PromptCache:
        """Keys and values of a prompt, ids; its beginning is taken from `known` if it is there.

        Raises UsageError where the prompt is longer than the context: it would slide.
        """
        self._turn += 1
        return compute_prompt_cache(self.engine, prompt, known)

    def save_cache(self, path: str | Path, cache: PromptCache) -> None:
        """Writes a prompt's keys and values to a file, for this model alone."""
        arrays = {"keys": cache.keys, "values": cache.values}
        arrays["tokens"] = np.array(cache.tokens, np.int64)
        prompt_cache.save(Path(path), arrays, self._owner)

    def load_cache(self, path: str | Path) -> PromptCache:
        """Reads what `save_cache` wrote; raises ModelError if it is of another model."""
        found = prompt_cache.load(Path(path), self.bundle.config, self._owner)
        return PromptCache(found["tokens"].tolist(), found["keys"], found["values"])

    @cached_property
    def _owner(self) -> prompt_cache.Owner:
        return prompt_cache.Owner(digest(self.bundle), self.bundle.path, self.engine.stored)

    def weights(self, kind: Literal["numpy", "torch"] = "numpy") -> dict[str, Any]:
        """Every weight in float32, by transformers' names."""
        return conversions.weights(self.bundle, kind)

    def to_transformers(self) -> Any:
        """The model as one of transformers, float32; raises UsageError where that is missing."""
        return conversions.to_transformers(self.bundle)

    def score(self, text: str | bytes) -> float:
        """Bits per byte of a text: how surprised the model is.

        Its first token is predicted from the start of a document; past the context every token is
        predicted from at least the half before it.
        """
        ids = self.encode(text)
        start = None if self.tokenizer.start else self.tokenizer.end_of_text
        stream = ([start] if start is not None else []) + ids
        self._turn += 1
        nats = total_nll(self.engine, stream)
        n_bytes = len(raw(text))
        if not n_bytes:
            raise UsageError("there is no text to score", "give at least one byte")
        return nats / math.log(2) / n_bytes
