"""Constrained generation: a choice, a regular expression, or JSON that matches a schema.

llguidance computes which tokens are allowed. A text that cannot continue is complete and ends.
"""

import json
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tgen.config import CONSTRAINTS, SamplingConfig, raw
from tgen.errors import TgenError, UsageError

try:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
except ImportError:
    raise TgenError(
        "choices, regular expressions and JSON schemas need the package llguidance",
        "pip install llguidance",
    ) from None


class Matcher:
    """The state of one text within a grammar."""

    def __init__(self, matcher: LLMatcher, end: int, ends: Sequence[int]) -> None:
        self._matcher, self._end, self._ends = matcher, end, ends

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Return a mask (size,) of allowed tokens, with end tokens if the text is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        flags = np.unpackbits(bits, count=self._end + 1, bitorder="little").astype(bool)
        allowed = np.zeros(size, bool)
        n = min(size, self._end)
        allowed[:n] = flags[:n]
        allowed[self._ends] = flags[self._end]
        return allowed

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        if token not in self._ends:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the text so far matches."""
        return bool(self._matcher.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether no token is allowed any more."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """A factory of matchers for one vocabulary, which compiles each grammar once.

    It is also the tokenizer object that llguidance expects.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        ends: Collection[int],
        encode: Callable[[bytes], Sequence[int]],
    ) -> None:
        self._encode = encode
        # One more token as the end of text, since not every vocabulary has one.
        self.tokens, self.eos_token_id, self._ends = [*tokens, b""], len(tokens), sorted(ends)
        self.bos_token_id, self.special_token_ids = None, [*self._ends, len(tokens)]
        self._tokenizer = LLTokenizer(TokenizerWrapper(self))
        self._compiled = lru_cache(maxsize=100)(self._compile)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Return the ids of a text; llguidance uses it for forced tokens."""
        return self._encode(text.encode() if isinstance(text, str) else text)

    def matcher(self, sampling: SamplingConfig) -> Matcher | None:
        """Return a new matcher for the constraint of `sampling`, None without one.

        Raises UsageError if the constraint is invalid or allows no text.
        """
        kind = next((name for name in CONSTRAINTS if getattr(sampling, name)), None)
        if kind is None:
            return None
        value = sampling.regex or sampling.json_schema or _choices_grammar(sampling.choices)
        return Matcher(self._compiled(kind, value).deep_copy(), self.eos_token_id, self._ends)

    def _compile(self, kind: str, value: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _to_llguidance(kind, value), log_level=0)
        except ValueError as error:
            raise UsageError(f"{kind}: {error}", "use a valid JSON schema", field=kind) from None
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split("|")[0].split())[:200]
            raise UsageError(f"{kind}: {reason}", "use syntax that llguidance supports", field=kind)
        if matcher.is_stopped():
            raise UsageError(f"{kind} allows no text", "use one that allows some text", field=kind)
        return matcher


def _to_llguidance(kind: str, value: str) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "json_schema":
        # One space after colons and commas and no other: whitespace could repeat endlessly.
        return LLMatcher.grammar_from_json_schema(
            value,
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
    return LLMatcher.grammar_from_lark(value)


def _choices_grammar(choices: Sequence[str | bytes]) -> str:
    try:
        texts = [json.dumps(raw(text).decode(), ensure_ascii=False) for text in choices]
    except UnicodeDecodeError:
        raise UsageError(
            "choices is not UTF-8", "encode the choices in UTF-8", field="choices"
        ) from None
    return "start: " + " | ".join(texts)
