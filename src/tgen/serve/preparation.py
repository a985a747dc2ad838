"""The engine's requests of a request for texts.

Worker threads apply the template, tokenize, and check limits and grammar, so that these do not
delay other texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tgen.chat.encode import ChatFormat
from tgen.config import SamplingConfig
from tgen.errors import ModelError
from tgen.generation.logits_processors import LogitsProcessors
from tgen.generation.random_numbers import new_seed, row_seed, sample_seed
from tgen.generation.sequence import Request
from tgen.loaded_model import LoadedModel
from tgen.serve.call_form import CallForm, plan_calls
from tgen.serve.http_error import HttpError, bad_request, name_as_sent
from tgen.serve.text_request import ChatRequest, CompletionRequest, TextRequest

_MAX_NOTES, _NOTE_LENGTH = 10, 200  # in a header
_MAX_COMPOSED = 4  # maximum number of characters that a normalizer composes into one
# As in OpenAI's API, penalties ignore the prompt, and a text must fit the context.
_FIXED = {"penalize_prompt": False, "overflow": "error"}


def check_ids(ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raise HttpError for the first id of a field that the model does not have."""
    for i in ids:
        if not 0 <= i < vocab_size:
            message = f"{field}: invalid token id {i if abs(i) < 2**63 else 'beyond 64 bits'}"
            raise bad_request(f"{message}, expected ids below {vocab_size:,}", field)


class PreparedTexts(NamedTuple):
    """The engine's requests, `per_prompt` of each, and what the answer says about the prompts."""

    requests: list[Request]
    prompt_tokens: int  # over all prompts
    echoes: list[str]  # per prompt, if requested
    seed: int  # of the request
    calls: CallForm | None = None  # if the texts may call tools
    notes: Sequence[str] = ()  # about what is not enforced of the schemas


def prepare(
    model: LoadedModel,
    request: TextRequest,
    max_tokens: int,
    *,
    strict: bool = False,
    calls: CallForm | None = None,
) -> PreparedTexts:
    """Encode the prompts and check that each text can be generated.

    `calls` is the form of the calls of a request with tools, see `find_call_form`. A text has up to
    `max_tokens` new tokens; with `strict`, a request for more is an error, as is one for more than
    fit the context. Without a seed, one is chosen. Text c of prompt p has the seed of the text that
    `tgen generate` gives as sample c of row p. Raises HttpError and TgenError.
    """
    seed = new_seed() if request.seed < 0 else request.seed
    prompts, ends = _encode(model, request)
    request_sampling = request.sampling | (calls.constraint if calls else {})
    requests: list[Request] = []
    echoes: list[str] = []
    is_described = request.n_top is not None or request.per_prompt > request.n  # best_of
    for p, ids in enumerate(prompts):
        options = model.defaults | request_sampling | _FIXED
        options["logprobs"] = request.n_top or 0
        options["max_new_tokens"] = _limit_new_tokens(
            model, request, len(ids), max_tokens, strict=strict
        )
        try:
            sampling = SamplingConfig(**options, seed=row_seed(seed, p))
            first = model.request(ids, sampling, ends)
            LogitsProcessors(sampling, model.vocabulary)  # caches what the engine's thread needs
        except RecursionError:
            raise bad_request("the nesting is too deep", "response_format") from None
        for c in range(request.per_prompt):
            other = sampling.with_seed(sample_seed(sampling.seed, c))
            requests.append(first._replace(sampling=other, described=is_described))
        if isinstance(request, CompletionRequest) and request.echo:
            prompt = request.prompt[p]
            decoded = model.tokenizer.decode(ids).decode(errors="replace")
            echoes.append(prompt if isinstance(prompt, str) else decoded)
    notes = _find_notes(model, request, calls, sampling)
    return PreparedTexts(requests, sum(map(len, prompts)), echoes, seed, calls, notes)


def find_call_form(model: LoadedModel, request: ChatRequest) -> CallForm:
    """Return how the texts of a request with tools call them; raises HttpError."""
    tokenizer, syntax = model.tokenizer, find_chat_format(model, request).call_syntax
    form = plan_calls(request, syntax, tokenizer.control_tokens)
    _ = form.constraint  # cached here, in a worker thread
    return form


def _find_notes(
    model: LoadedModel, request: TextRequest, calls: CallForm | None, sampling: SamplingConfig
) -> list[str]:
    """Return notes about the schemas of a request, by their fields; `sampling` has compiled."""
    if not sampling.constrained:
        return []
    field = "grammar" if sampling.grammar else "json_schema"
    notes = []
    for note in model.vocabulary.grammars.notes(sampling)[:_MAX_NOTES]:
        place, rest = calls.name_place(note) if calls else (field, note)
        notes.append(f"{name_as_sent(place, request.names)}: {rest}"[:_NOTE_LENGTH])
    return notes


def _encode(model: LoadedModel, request: TextRequest) -> tuple[list[list[int]], frozenset[int]]:
    """Return the ids of each prompt, and the tokens that end a text besides the model's own."""
    if isinstance(request, ChatRequest):
        try:
            chat = find_chat_format(model, request)
        except HttpError:
            if request.needs_template or len(request.messages) > 1:
                raise
            text = request.conversation[0]["content"]
            _check_characters(model, text)
            return [model.encode(text)], frozenset()
        try:
            ids = chat.encode(
                request.conversation,
                request.shown_tools,
                prompt=request.starts_answer,
                continued=request.is_continued,
            )
        except RecursionError:
            raise bad_request("the nesting is too deep", "messages") from None
        return [ids], chat.end_ids
    prompts = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            _check_characters(model, prompt)
            prompts.append(model.encode(prompt))
        else:
            check_ids(prompt, model.tokenizer.vocab_size)
            prompts.append(prompt)
    return prompts, frozenset()


def find_chat_format(model: LoadedModel, request: ChatRequest) -> ChatFormat:
    """Return the chat template of a model; raises HttpError if it has none that is usable."""
    try:
        return model.chat_format
    except ModelError:
        message = (
            f"the model {request.model!r} has no usable chat template; use /v1/completions, or "
            "a model with a chat template"
        )
        raise bad_request(message, "messages", "no_template") from None


def _check_characters(model: LoadedModel, prompt: str) -> None:
    """Raise HttpError for a prompt that cannot fit the context, before it is encoded."""
    length = model.engine.context_length
    if len(prompt) <= length:
        return
    longest = max(map(len, model.vocabulary.tokens))
    n = len("".join(prompt.split()))  # some tokenizers drop white space
    if n > length * longest * _MAX_COMPOSED:
        message = f"a prompt of {n:,} characters does not fit the context of {length:,} tokens"
        raise bad_request(message, "prompt", "context_length_exceeded")


def _limit_new_tokens(
    model: LoadedModel, request: TextRequest, n_prompt: int, max_tokens: int, *, strict: bool
) -> int:
    """Return the maximum number of new tokens of a prompt's texts, which fit in the context."""
    length, requested = model.engine.context_length, request.max_tokens
    if strict and requested is not None and requested > max_tokens:
        message = f"max_tokens: invalid value {requested}, expected at most {max_tokens:,}"
        code = "context_length_exceeded" if requested > length else None
        raise bad_request(message, "max_tokens", code)
    count = request.default_tokens if requested is None else requested
    if count is None or count < 0:
        count = max_tokens
    room = length + 1 - n_prompt  # a full context still predicts one more token
    needed = count if strict and requested == count else min(count, 1)
    if room < needed:
        verb = f" and {needed:,} new tokens do" if needed > 1 else " does"
        raise bad_request(
            f"a prompt of {n_prompt:,} tokens{verb} not fit the context of {length:,} tokens",
            "messages" if request.chat else "prompt",
            "context_length_exceeded",
        )
    return min(count, max_tokens, room)
