"""Requests and the context window: what fits, and which part of a longer text the model sees."""

from collections.abc import Sequence
from typing import NamedTuple

from tgen.config import SamplingConfig, raw
from tgen.errors import UsageError
from tgen.generation.logits_processors import missing_strings
from tgen.generation.vocabulary import Vocabulary


class Request(NamedTuple):
    """A prompt to continue, and its sampling settings."""

    prompt: Sequence[int]  # at least one token
    sampling: SamplingConfig
    ends: frozenset[int] = frozenset()  # end tokens of this request besides the vocabulary's


def check_request(request: Request, vocabulary: Vocabulary, context_length: int) -> None:
    """Raise UsageError if the prompt or the required strings do not fit, or no text can match."""
    sampling, n_prompt = request.sampling, len(request.prompt)
    room = context_length + 1 - n_prompt
    slides, n_new = sampling.overflow == "slide", sampling.max_new_tokens
    if not slides and n_new and room < (n_new if sampling.overflow == "error" else 1):
        if room < 1:
            raise UsageError(
                f"the prompt has {n_prompt} tokens (context length {context_length})",
                "shorten the prompt, or add --overflow slide",
            )
        raise UsageError(
            f"prompt tokens ({n_prompt}) and new tokens ({n_new}) do not fit "
            f"(context length {context_length})",
            f"use -n {room} or less, or add --overflow slide",
        )
    if sampling.constrained:
        vocabulary.grammars.matcher(sampling)
    required = missing_strings([raw(text) for text in sampling.require], b"")
    try:
        needed = sum(len(vocabulary.encode(text)) for text in required)
    except UsageError as error:
        raise UsageError(f"require: {error.message}", error.hint, field="require") from None
    available = n_new if slides else min(n_new, room)
    if needed > available:
        raise UsageError(
            f"require: the strings have {needed} token{'s' * (needed != 1)}, but only {available} "
            "can be generated",
            f"use -n {needed} or more, and add --overflow slide",
            field="require",
        )


def window_start(n_tokens: int, context_length: int) -> int:
    """Return the first token inside the window after a text of `n_tokens` has slid."""
    if n_tokens <= context_length:
        return 0
    stride = default_stride(context_length)
    return stride * -(-(n_tokens - context_length) // stride)


def default_stride(context_length: int) -> int:
    """Return the number of tokens by which a window moves: half a context, at least 1."""
    return max(1, context_length - context_length // 2)
