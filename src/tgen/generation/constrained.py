"""Text of a given form: one of some choices, what a regular expression matches, or JSON.

llguidance says which tokens may follow. A text that cannot go on is complete, and ends there.
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
    """One text on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, end: int, ends: Sequence[int]) -> None:
        self._matcher, self._end, self._ends = matcher, end, ends

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Which of `size` tokens may follow, (V,); one that ends a text where it is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, count=self._end + 1, bitorder="little").astype(bool)
        allowed = np.zeros(size, bool)
        n = min(size, self._end)
        allowed[:n] = found[:n]
        allowed[self._ends] = found[self._end]
        return allowed

    def accept(self, token: int) -> None:
        """Goes on with a token that was allowed."""
        if token not in self._ends:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the text is of the form as it stands."""
        return bool(self._matcher.is_accepting())

    @property
    def over(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Matchers for one vocabulary; a grammar is compiled once."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        ends: Collection[int],
        encode: Callable[[bytes], Sequence[int]],
    ) -> None:
        self._encode = encode
        # Not all vocabularies have an end of text: one more token stands for it.
        self.tokens, self.eos_token_id, self._ends = [*tokens, b""], len(tokens), sorted(ends)
        self.bos_token_id, self.special_token_ids = None, [*self._ends, len(tokens)]
        self._tokenizer = LLTokenizer(TokenizerWrapper(self))
        self._compiled = lru_cache(maxsize=100)(self._compile)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """The ids of a text, for the library: it knows by them what is forced."""
        return self._encode(text.encode() if isinstance(text, str) else text)

    def matcher(self, sampling: SamplingConfig) -> Matcher | None:
        """The beginning of a text, if it is to be of a form. Raises UsageError if none can be."""
        kind = next((name for name in CONSTRAINTS if getattr(sampling, name)), None)
        if kind is None:
            return None
        value = sampling.regex or sampling.json_schema or _lark(sampling.choices)
        return Matcher(self._compiled(kind, value).deep_copy(), self.eos_token_id, self._ends)

    def _compile(self, kind: str, value: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(kind, value), log_level=0)
        except ValueError as error:
            raise UsageError(f"{kind}: {error}", "give a JSON schema", field=kind) from None
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split("|")[0].split())[:200]
            raise UsageError(f"{kind}: {reason}", "change it to what llguidance reads", field=kind)
        if matcher.is_stopped():
            raise UsageError(f"{kind} allows no text", "give one that allows some", field=kind)
        return matcher


def _grammar(kind: str, value: str) -> str:
    """What llguidance reads."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "json_schema":
        # A fixed space after : and , and no other: white space could go on forever.
        return LLMatcher.grammar_from_json_schema(
            value,
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
    return LLMatcher.grammar_from_lark(value)


def _lark(choices: Sequence[str | bytes]) -> str:
    try:
        texts = [json.dumps(raw(text).decode(), ensure_ascii=False) for text in choices]
    except UnicodeDecodeError:
        raise UsageError("choices is not UTF-8", "give texts in UTF-8", field="choices") from None
    return "start: " + " | ".join(texts)
