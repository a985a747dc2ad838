"""The facts and numbers of the live page that the engine computes: /tgen/model, /tgen/tokens,
/tgen/next, /tgen/cache and /tgen/sources."""

import base64
import time
from contextlib import suppress
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator

from tgen.config import SamplingConfig
from tgen.drawing.colormap import RAMP
from tgen.drawing.terminal_text import decode_printable, printable
from tgen.drawing.view_options import SLIDERS
from tgen.engine.base import Engine, reset
from tgen.errors import ModelError, TgenError
from tgen.generation.distribution import logits_record
from tgen.generation.truncation import sort_candidates
from tgen.inspection.sources import find_sources
from tgen.loaded_model import LoadedModel
from tgen.runs import saved_state
from tgen.runs.text_sources import stored_index
from tgen.serve.http_error import HttpError, bad_request
from tgen.serve.json_body import JsonObject, Objects, Unicode, is_ids, validate
from tgen.serve.live_tokens import MAX_TOP, describe_token, name_token
from tgen.serve.preparation import check_ids, find_chat_format
from tgen.serve.text_request import ChatRequest, to_request

_REPEATS = 5
_MAX_PHRASE = 2000  # characters
_PLACES = 5  # of a passage
_NAMED = 100  # most likely tokens


def check_base64(value: Any) -> bytes:
    """Return the bytes; raises ValueError for another value than base64."""
    with suppress(ValueError, TypeError):
        return base64.b64decode(value, validate=True)
    raise ValueError("base64")


def check_token_ids(value: Any) -> list[int]:
    """Return a list of token ids that is not empty; raises ValueError for another value."""
    if not value or not is_ids(value):
        raise ValueError("a list of token ids")
    return list(value)


Ids = Annotated[list[int], PlainValidator(check_token_ids)]
Base64 = Annotated[bytes, PlainValidator(check_base64)]


class _Prompt(JsonObject, extra="forbid"):
    """A prompt: one of three forms."""

    bytes: Base64 | None = None
    ids: Ids | None = None
    messages: Objects | None = None
    top: Annotated[int, Field(ge=0, le=MAX_TOP)] = 10

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if sum(one is not None for one in (self.bytes, self.ids, self.messages)) != 1:
            raise bad_request("expected one of bytes, ids and messages")
        return self


class _Position(JsonObject, extra="forbid"):
    ids: Ids  # of the text


class _Phrase(JsonObject, extra="forbid"):
    text: Annotated[Unicode, Field(min_length=1, max_length=_MAX_PHRASE)]


class _Length(JsonObject, extra="forbid"):
    ids: Ids  # repeated up to the length
    length: Annotated[int, Field(ge=2)]


def model_facts(model: LoadedModel, name: str, _: dict[str, Any]) -> dict[str, Any]:
    """Return what the page needs to know about a model."""
    config, tokenizer, has_template = model.bundle.config, model.tokenizer, False
    with suppress(ModelError):
        has_template = bool(model.chat_format)
    defaults = SamplingConfig(**model.defaults)
    options = ((name, getattr(model.options, name)) for name in ("device", "dtype", "cache_dtype"))
    return {
        "name": name,
        "family": config.family,
        "vocabulary": tokenizer.vocab_size,
        "context": model.engine.context_length,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "dtype": model.engine.dtype,
        "engine": {field: value for field, value in options if value not in (None, "auto")},
        "chat": has_template,
        "residual_stream": not config.post_norm,
        "controls": {i: name for name, i in tokenizer.control_tokens.items()},
        "ramp": RAMP,
        "sampling": {field: getattr(defaults, field) for field in (*SLIDERS, "repetition_penalty")},
    }


def tokens(model: LoadedModel, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a prompt with their log-probabilities, and the ids that end a text.

    Raises HttpError, UsageError and ModelError.
    """
    request, ends = validate(_Prompt, values), model.bundle.end_ids
    if request.ids is not None:
        check_ids(request.ids, model.tokenizer.vocab_size, "ids")
        ids = request.ids
    elif request.messages is not None:
        chat = to_request({"messages": request.messages}, ChatRequest, name)
        chat_format = find_chat_format(model, chat)
        ids, ends = chat_format.encode(chat.conversation), chat_format.end_ids | ends
    else:
        ids = model.encode(request.bytes or b"")
    check_length(ids, model.engine.context_length)
    scored, bytes_of = model.score_prompt(ids, request.top), model.vocabulary.bytes_of
    return {"tokens": [describe_token(bytes_of, one) for one in scored], "ends": sorted(ends)}


def next_token(model: LoadedModel, _: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the logits of the token after `ids`, for `samplers.js`, and the most likely tokens.

    Raises HttpError and ModelError.
    """
    ids = validate(_Position, values).ids
    check_ids(ids, model.tokenizer.vocab_size, "ids")
    check_length(ids, model.engine.context_length)
    logits = model.vocabulary.only_tokens(model.next_logits(ids))
    likely = sort_candidates(logits, _NAMED)[0][0]
    bytes_of = model.vocabulary.bytes_of
    return {
        "logits": logits_record(logits[0], also=ids),
        "likely": [name_token(bytes_of, i) for i in likely.tolist()],
    }


def cache_times(model: LoadedModel, _: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of the last token of a text with and without the KV cache.

    Raises HttpError and ModelError.
    """
    request = validate(_Length, values)
    check_ids(request.ids, model.tokenizer.vocab_size, "ids")
    n = request.length
    if n > model.engine.context_length:
        raise bad_request(f"length: expected at most {model.engine.context_length:,}", "length")
    ids = (request.ids * -(-n // len(request.ids)))[:n]
    with model.borrow_engine() as engine:
        reset(engine, 1)
        engine.check_room([n])
        engine.extend([ids])  # warms up
        cached = [_milliseconds(engine, n - 1, ids[-1:]) for _ in range(_REPEATS)]
        return {
            "length": n,
            "with_cache": sorted(cached)[_REPEATS // 2],
            "without_cache": _milliseconds(engine, 0, ids),
        }


def sources(model: LoadedModel, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the longest passages of a text that the training text has, with their places.

    Raises HttpError for a model without an index of its run's training text.
    """
    text = validate(_Phrase, values).text.encode()
    out, index, problem = model.bundle.named_path, None, ""
    with suppress(TgenError, KeyError, OSError):  # no run, or its record is damaged
        index, problem = stored_index(out, saved_state.load_record(out)[0]["corpus_sha256"])
    if index is None:
        has = f"has an index that {problem}" if problem else "has no index of its training text"
        message = f"the model {name!r} {has}: train with --index"
        raise HttpError(404, message, code="no_index")
    report = find_sources(index, text, places=_PLACES)
    return {
        "passages": [
            {
                "text": decode_printable(one.text),
                "count": one.occurrences,
                "places": [
                    {"file": printable(place.file), "line": place.line}
                    | {
                        "before": decode_printable(place.before),
                        "after": decode_printable(place.after),
                    }
                    for place in one.places
                ],
            }
            for one in report.passages
        ],
        "covered": report.n_covered,
        "bytes": report.n_bytes,
    }


def _milliseconds(engine: Engine, n_cached: int, ids: list[int]) -> float:
    engine.rewind([n_cached])
    begin = time.perf_counter()
    engine.extend([ids])
    return 1e3 * (time.perf_counter() - begin)


def check_length(ids: list[int], limit: int, field: str | None = None) -> None:
    """Raise HttpError for a text that is longer than the context."""
    if len(ids) > limit:
        message = f"the text has {len(ids):,} tokens (limit {limit:,})"
        raise bad_request(message, field, "context_length_exceeded")
