"""The tokens of a text one by one, with their alternatives: the answer of /tgen/generate."""

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from tgen.drawing.terminal_text import label
from tgen.generation.logprobs import TokenLogprobs
from tgen.reports.generation import Token
from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import Event
from tgen.serve.preparation import PreparedTexts
from tgen.serve.text_request import CompletionRequest, TextRequest

MAX_TOP = 50
TokenBytes = Callable[[int], bytes]


class TokensRequest(CompletionRequest):
    """The body of /tgen/generate: that of /v1/completions, with more `logprobs`."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 10


class TokenAnswer(Answer):
    """The tokens of a request's texts, as far as they have been generated."""

    def __init__(
        self,
        request: TextRequest,
        prepared: PreparedTexts,
        model: str,
        fingerprint: str,
        token_bytes: TokenBytes,
    ) -> None:
        super().__init__(request, prepared, model, fingerprint, token_bytes)
        self._with_logprobs = False  # `_new` has the tokens; do not store them per text
        self._token_bytes, self._new = token_bytes, list[tuple[int, Token]]()
        self._facts = {"model": model, "seed": prepared.seed, "prompt_tokens": self.prompt_tokens}

    def add(self, events: Sequence[Event]) -> None:
        """Add tokens; raises HttpError for a text that cannot satisfy its constraint."""
        super().add(events)
        self._new += [(i, event) for i, event in events if isinstance(event, Token)]

    @property
    def n_described(self) -> int:
        """Number of new tokens."""
        return len(self._new)

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request that is not a stream."""
        return self._facts | self._take()

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the seed and the size of the prompt."""
        yield self._facts

    def new_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the tokens since the last call."""
        if self._new:
            yield self._take()

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield nothing more."""
        yield from ()

    def _take(self) -> dict[str, Any]:
        tokens, self._new = self._new, []
        return {
            "tokens": [
                describe_token(self._token_bytes, token)
                | {"text": text, "rank": token.rank, "finish": token.finish}
                for text, token in tokens
            ]
        }


def describe_token(token_bytes: TokenBytes, token: Token | TokenLogprobs) -> dict[str, Any]:
    """Return a token of a text with its log-probability (nats; None: nothing predicts it) and the
    most likely tokens at its position."""
    top = [name_token(token_bytes, i) | {"logprob": value} for i, value in token.top_logprobs]
    return name_token(token_bytes, token.id) | {"logprob": token.logprob, "top": top}


def name_token(token_bytes: TokenBytes, i: int) -> dict[str, Any]:
    """Return the id of a token, its printable label, and its bytes in base64."""
    data = token_bytes(i)
    return {"id": i, "label": label(data), "bytes": base64.b64encode(data).decode()}
