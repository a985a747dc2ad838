"""The end of a JSON text before its token limit: a short completion of what is there.

It is found by trying: on a copy of the matcher, the token that closes most is appended until the
text is complete. So it is allowed, but not always the shortest one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase, digits, punctuation

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tgen.engine.base import Logits

_OUTSIDE, _INSIDE, _ESCAPED = range(3)  # where a text ends: outside of a string, inside, after \
# Tokens that may be tried for a text; a higher price would slow down the texts beside it.
_FIRST_BUDGET, _BUDGET_PER_TOKEN = 2000, 20
_CLOSING = frozenset(b'"}]')
# Bytes to try in turn where a string cannot end: separators of formats first.
_IN_STRING = "".join(("Z@:-./", punctuation, ascii_uppercase, digits, ascii_lowercase)).encode()
_IN_VALUE = b"1234567890-ntf[{: "


class Completer:
    """Finds completions with the tokens of one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], tokenizer: LLTokenizer) -> None:
        self.tokens, self._tokenizer = tokens, tokenizer
        single = {token[0]: i for i, token in reversed([*enumerate(tokens)]) if len(token) == 1}
        closing = sorted(
            (i for i, token in enumerate(tokens) if token and _CLOSING.issuperset(token)),
            key=lambda i: (tokens[i][:1] == b'"', -len(tokens[i])),
        )
        quotes = [i for i in closing if tokens[i][:1] == b'"']
        values = [single[byte] for byte in (*_IN_VALUE, *range(256)) if byte in single]
        texts = [single[byte] for byte in (*_IN_STRING, *range(256)) if byte in single]
        ends = closing[: len(closing) - len(quotes)]
        ends += [single[byte] for byte in b"," if byte in single]  # of a number
        self._outside = np.array([*ends, *values[:10], *quotes, *values[10:]], np.int64)
        self._inside = np.array([*quotes, *texts], np.int64)
        self._n_closing = {True: len(ends), False: len(quotes)}

    def complete(self, matcher: LLMatcher, place: int, limit: int) -> tuple[list[int] | None, int]:
        """Return up to `limit` tokens that complete the text of a matcher, which is changed, or
        None if none were found; and how many were tried.

        `place`: where the text ends, see `place_after`.
        """
        path: list[int] = []
        seen_inside: Counter[bytes] = Counter()  # of the string
        seen_outside: Counter[bytes] = Counter()
        while not matcher.is_accepting():
            new = self._forced(matcher)
            if not new:
                bits = matcher.compute_bitmask()
                order = self._outside if place == _OUTSIDE else self._inside
                flags = np.frombuffer(bits, np.uint8)[order >> 3] >> (order & 7) & 1
                allowed = order[flags.astype(bool)]
                if not len(allowed):
                    return None, len(path)
                seen = seen_outside if place == _OUTSIDE else seen_inside
                turn = 0
                if not flags[: self._n_closing[place == _OUTSIDE]].any():
                    turn = seen[bits] % len(allowed)  # so that a repetition ends
                    seen[bits] += 1
                new = [int(allowed[turn])]
                matcher.consume_token(new[0])
            path += new
            if len(path) > limit or matcher.is_error():
                return None, len(path)
            place = place_after(place, b"".join(self.tokens[i] for i in new))
            if place == _OUTSIDE:
                seen_inside.clear()
        return path, len(path)

    def _forced(self, matcher: LLMatcher) -> list[int]:
        """Append the only text that can follow; return its tokens."""
        forced = matcher.compute_ff_bytes()
        tokens = self._tokenizer.tokenize_bytes(forced) if forced else []
        return tokens[: matcher.try_consume_tokens(tokens)] if tokens else []


def place_after(place: int, text: bytes) -> int:
    """Return where a JSON text ends after more of it; 0 at its start."""
    for byte in text:
        if place == _ESCAPED:
            place = _INSIDE
        elif place == _INSIDE and byte in b'\\"':
            place = _ESCAPED if byte == ord("\\") else _OUTSIDE
        elif byte == ord('"'):
            place = _INSIDE
    return place


class CompletionGuard:
    """Keeps one text completable within its token limit."""

    def __init__(self, completer: Completer, growth: int, end: int | None) -> None:
        """`growth`: estimate of how many tokens a token can add to the completion. `end` ends a
        text that is complete."""
        self._completer, self._growth, self._end = completer, growth, end
        self._place = 0
        # Completions of the text, and of the text with the chosen token; None: not known.
        self._known: list[int] | None = None
        self._next: list[int] | None = None
        self._check_below: float = math.inf  # tokens left; above, every completion fits
        self._active = True
        # The tokens that may still be tried; below 0, nothing is tried until it has grown.
        self._budget = _FIRST_BUDGET

    def choose(self, matcher: LLMatcher, token: int, logits: Logits, n_left: int) -> int:
        """See `Matcher.choose`."""
        if not self._active or n_left >= self._check_below:
            return token
        if self._known and token == self._known[0]:
            self._next = self._known[1:]
            return token
        if self._budget < 0:
            n_unchecked = -self._budget // _BUDGET_PER_TOKEN + 1
            if self._known is None or len(self._known) + n_unchecked <= n_left:
                return token
            return self._close(self._known, token, logits)
        self._next = self._complete(matcher, n_left, [token])
        if self._next is not None:
            self._check_below = n_left - (n_left - len(self._next)) // (self._growth + 1)
            return token
        if self._known is None:
            self._known = self._complete(matcher, n_left + 1, [])
        if self._known is None:  # the limit is too small
            self._active = False
            return token
        return self._close(self._known, token, logits)

    def _close(self, known: list[int], token: int, logits: Logits) -> int:
        """Return the next token of a completion; `token` if that one must not be chosen."""
        closing = known[0] if known else self._end
        if closing is None or logits[closing] == -float("inf"):
            return token
        self._next = known[1:]
        return closing

    def accept(self, token: int) -> None:
        """Append the chosen token."""
        self._place = place_after(self._place, self._completer.tokens[token])
        self._known, self._next = self._next, None
        self._budget = min(self._budget + _BUDGET_PER_TOKEN, _FIRST_BUDGET)

    def _complete(self, matcher: LLMatcher, limit: int, new: Sequence[int]) -> list[int] | None:
        matcher, place = matcher.deep_copy(), self._place
        for token in new:
            matcher.consume_token(token)
            place = place_after(place, self._completer.tokens[token])
        path, n_tried = self._completer.complete(matcher, place, limit)
        self._budget -= n_tried
        return path
