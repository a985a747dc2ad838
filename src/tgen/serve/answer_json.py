"""The JSON that answers a request: whole, or in the chunks of a stream."""

import codecs
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tgen.generation.logprobs import TokenLogprobs
from tgen.reports.generation import Token
from tgen.serve.call_form import CallForm
from tgen.serve.call_reader import CallReader
from tgen.serve.engine_thread import Event, PromptScores
from tgen.serve.http_error import bad_request
from tgen.serve.preparation import PreparedTexts
from tgen.serve.text_request import TextRequest

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class Answer:
    """The texts of one request as far as they have been generated."""

    def __init__(
        self,
        request: TextRequest,
        prepared: PreparedTexts,
        model: str,
        fingerprint: str,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._request, self.prompt_tokens = request, prepared.prompt_tokens
        self._with_logprobs = request.n_top is not None
        self._texts = [
            _Text(token_bytes, chat=request.chat, calls=prepared.calls) for _ in prepared.requests
        ]
        for i, text in enumerate(self._texts):
            text.new = prepared.echoes[i // request.per_prompt] if prepared.echoes else ""
        kind = "chat.completion" if request.chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12),
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def add(self, events: Sequence[Event]) -> None:
        """Add tokens; raises HttpError for a text that cannot satisfy its constraint."""
        for i, event in events:
            if isinstance(event, PromptScores):
                self._texts[i].add_prompt(event)
                continue
            if event.finish == "stop" and not event.complete:
                field = self._request.constraint
                message = "the text is incomplete, but no token can follow"
                error = bad_request(f"{field}: {message}" if field else message, field)
                raise error.use_names(self._request.names)
            self._texts[i].add(event, with_logprobs=self._with_logprobs)

    @property
    def is_complete(self) -> bool:
        """Whether all texts have ended."""
        return all(text.finish for text in self._texts)

    @property
    def finishes(self) -> list[str]:
        """Why the texts that have ended did."""
        return [text.finish for text in self._texts if text.finish]

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens of all texts, end tokens included."""
        return sum(text.n_tokens for text in self._texts)

    @property
    def n_described(self) -> int:
        """Number of new tokens whose log-probabilities are in the answer."""
        return sum(len(text.tokens) for text in self._texts)

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request that is not a stream."""
        choices = []
        for i, text in enumerate(self._best_texts()):
            content, logprobs = text.take(with_logprobs=self._with_logprobs)
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if text.reader and text.reader.calls:
                message |= {"content": content or None, "tool_calls": text.reader.calls}
            body = {"message": message} if self._request.chat else {"text": content}
            choices.append({"index": i, **body, "logprobs": logprobs, "finish_reason": text.finish})
        return self._head | {"choices": choices, "usage": self._usage()}

    def _best_texts(self) -> Iterator["_Text"]:
        """Yield the texts of the answer: with `best_of`, those of the highest log-probability per
        token, the best first."""
        n, per_prompt = self._request.n, self._request.per_prompt
        for start in range(0, len(self._texts), per_prompt):
            texts = self._texts[start : start + per_prompt]
            if n < per_prompt:
                texts.sort(key=lambda text: -text.logprob / max(1, text.n_tokens))
            yield from texts[:n]

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield what a stream starts with: the role of each message, in order."""
        if self._request.chat:
            for i in range(len(self._texts)):
                yield self._chunk(i, {"delta": {"role": "assistant", "content": ""}})

    def new_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield what is new since the last call, one chunk per text that has something new."""
        for i, text in enumerate(self._texts):
            if not text.has_new_content:
                continue
            content, logprobs = text.take(with_logprobs=self._with_logprobs)
            if not self._request.chat:
                yield self._chunk(i, {"text": content}, logprobs, text.finish)
                continue
            if content or logprobs:
                yield self._chunk(i, {"delta": {"content": content}}, logprobs)
            for delta in text.reader.take_deltas() if text.reader else ():
                yield self._chunk(i, {"delta": {"tool_calls": [delta]}})
            if text.finish:
                yield self._chunk(i, {"delta": {}}, finish=text.finish)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the usage, if requested."""
        if self._request.stream_options.include_usage:
            yield self._head | {"choices": [], "usage": self._usage()}

    def _chunk(
        self,
        i: int,
        body: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": i, **body, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._request.stream_options.include_usage else {}
        return self._head | {"choices": [choice]} | usage

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


class _Text:
    """One text: what is new since the last `take`, and why it ended."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, chat: bool, calls: CallForm | None
    ) -> None:
        self._token_bytes, self._chat = token_bytes, chat
        self.reader = CallReader(calls) if calls else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters before the next token
        self.tokens: list[Token | TokenLogprobs] = []  # with log-probabilities
        self._with_prompt = False
        self.new = ""
        self.n_tokens, self.logprob = 0, 0.0
        self.finish: str | None = None
        self._finish_taken = False

    @property
    def has_new_content(self) -> bool:
        """Whether the next chunk has text, log-probabilities or the end."""
        calls = self.reader is not None and self.reader.deltas
        return bool(self.new or self.tokens or calls or (self.finish and not self._finish_taken))

    def add_prompt(self, prompt: PromptScores) -> None:
        """Add the tokens of the prompt, whose text is `new`."""
        self.tokens += prompt.tokens
        self._with_prompt = bool(prompt.tokens)
        text = b"".join(self._token_bytes(token.id) for token in prompt.tokens)
        if text.startswith(b" ") and not self.new.startswith(" "):
            self._offset = -1  # the tokenizer has put a space before the text
        if prompt.last:
            self.finish = "length"

    def add(self, token: Token, *, with_logprobs: bool) -> None:
        """Add a token; bytes of an incomplete character wait for the rest."""
        self.n_tokens += 1
        self.logprob += token.logprob
        text = self._decoder.decode(token.text, final=token.last)
        self.new += self.reader.feed(token.id, text, last=token.last) if self.reader else text
        # The end token has no text; clients that ask for the prompt's tokens count all of them.
        if with_logprobs and (self._with_prompt or self._token_bytes(token.id)):
            self.tokens.append(token)
        if token.finish:
            self.finish = "stop" if token.finish == "stop" else "length"
            if self.reader and self.reader.calls and token.complete:
                self.finish = "tool_calls"

    def take(self, *, with_logprobs: bool) -> tuple[str, dict[str, Any] | None]:
        """Return the new text and its tokens' log-probabilities."""
        content, tokens = self.new, self.tokens
        self.new, self.tokens = "", []
        self._finish_taken = self.finish is not None
        if not with_logprobs:
            return content, None
        return content, self._chat_form(tokens) if self._chat else self._legacy_form(tokens)

    def _chat_form(self, tokens: Sequence[Token | TokenLogprobs]) -> dict[str, Any]:
        return {
            "content": [
                self._describe(token.id, token.logprob)
                | {"top_logprobs": [self._describe(i, x) for i, x in token.top_logprobs]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _describe(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self._token_bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }

    def _legacy_form(self, tokens: Sequence[Token | TokenLogprobs]) -> dict[str, Any]:
        """Return the form of /v1/completions, with offsets in characters of the text."""
        offsets = []
        for token in tokens:
            offsets.append(max(0, self._offset))
            self._offset += len(self._offset_decoder.decode(self._token_bytes(token.id)))
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._name_top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _name_top(self, token: Token | TokenLogprobs) -> dict[str, float | None] | None:
        """Return the log-probabilities at a token's position by name.

        Parts of characters may have equal names; the others of them are named by their bytes.
        """
        if token.logprob is None:
            return None
        own, named = self._name(token.id), dict[str, float | None]()
        for i, logprob in token.top_logprobs:
            name = self._name(i)
            if i != token.id and (name == own or name in named):
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._token_bytes(i))
            named[name] = _finite(logprob)
        return named | {own: _finite(token.logprob)}

    def _name(self, token: int) -> str:
        return self._token_bytes(token).decode(errors="replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
