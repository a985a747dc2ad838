"""Constrained generation: a choice, a regular expression, JSON that matches a schema, or a grammar.

llguidance computes which tokens are allowed. A text that cannot continue is complete and ends.
"""

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgen.config import CONSTRAINTS, SamplingConfig, raw
from tgen.engine.base import Logits
from tgen.errors import TgenError, UsageError
from tgen.generation.json_schema import ONE_LINE, Translation, translate
from tgen.generation.schema_keywords import CUT_OFF, SchemaError, is_cut_off
from tgen.machine.daemon_thread import in_daemon_thread

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
except ImportError:
    raise TgenError(
        "choices, regular expressions, JSON schemas and grammars need the package llguidance",
        "pip install llguidance",
    ) from None

from tgen.generation.shortest_completion import Completer, CompletionGuard

_NO_TEXT = "no text matches"
# Below llguidance's own, 250,000: texts of one grammar share the states, of some 3 KB each.
_MAX_STATES = 20_000
_TOO_MANY_STATES = "too many states"
_MAX_COMPILED = 16  # grammars
_LIMITS = LLParserLimits(max_lexer_states=_MAX_STATES)
# Below llguidance's own: an ambiguous grammar could take seconds per token before it fails.
_GRAMMAR_LIMITS = LLParserLimits(
    max_items_in_row=500,
    step_max_items=5_000,
    step_lexer_fuel=50_000,
    max_lexer_states=_MAX_STATES,
)
_CORRECT = "correct the grammar; docs/generate.md describes the formats"
_CORRECT_REGEX = "correct it; look-around and backreferences are not supported"
_SUPPORTED = "use features that llguidance supports"
_LOCATION = re.compile(r"(?:at )?(\d+)\(\d+\): ")  # line and column
_MAX_CHARACTERS = 1 << 20  # of a grammar or a schema
_MAX_RULES = 2000
# llguidance calls itself for a rule within a rule, up to 180 MB deep within these limits.
_STACK_BYTES = 256 << 20
_MAX_SECONDS = 60  # to compile; a server allows less, see `serve.grammar_child`
_stack_size_lock = threading.Lock()
# A comment, a string, a regular expression, what is before a JSON schema, the colon of a rule.
_LARK_TOKEN = re.compile(
    r'(?://|\#)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?P<json>%json\s*)|(?P<rule>:)'
    r"|(?P<special><[^\s<>\[\]]+>)"
)
_ASCII = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[\t\n\v\f\r\x20]",
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^\t\n\v\f\r\x20]",
}
_MERGED = "properties or patterns merge schemas that refer to themselves, which is not supported"
_SYNTAX_CHARACTERS = 100  # of a grammar around the text of a JSON schema, at most, estimated
_PLAIN = {  # reasons of llguidance: what they mean
    'min/maxProperties only supported when all keys listed in "properties" are required': (
        "minProperties and maxProperties are only supported if all properties are required"
    ),
    "lexer error": "a character is not expected here, or a string is not closed on its line",
    "no start rule found": "the grammar has no rule named start",
}


class Matcher:
    """The state of one text within a grammar; `kind` is the option that the grammar comes from.

    llguidance may accept a grammar and fail later, at its own limits: then `allowed` and `accept`
    raise UsageError, so that the text does not count as complete.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end: int,
        ends: Sequence[int],
        kind: str,
        renew: Callable[[], LLMatcher],
        guard: CompletionGuard | None = None,
    ) -> None:
        """`renew` returns a matcher of the same grammar without the states of other texts."""
        self._matcher, self._end, self._ends, self._kind = matcher, end, ends, kind
        self._renew: Callable[[], LLMatcher] | None = renew
        self._tokens: list[int] = []
        self._guard = guard

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Return a mask (size,) of allowed tokens, with end tokens if the text is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._renew_if_starved():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher, self._kind)
        flags = np.unpackbits(bits, count=self._end + 1, bitorder="little").astype(bool)
        allowed = np.zeros(size, bool)
        n = min(size, self._end)
        allowed[:n] = flags[:n]
        # Where a control token is allowed, llguidance allows the end, too.
        allowed[self._ends] = flags[self._end] and self.complete
        return allowed

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        if token not in self._ends:
            self._tokens.append(token)
            self._matcher.consume_token(token)
            self._renew_if_starved()
            _check(self._matcher, self._kind)
            if self._guard is not None:
                self._guard.accept(token)

    def choose(self, token: int, logits: Logits, n_left: int) -> int:
        """Return an allowed token, or instead the next one of a completion if the text could not
        be completed with `n_left` tokens after it. Tokens with logits of -inf are not chosen."""
        if self._guard is None or token in self._ends:
            return token
        return self._guard.choose(self._matcher, token, logits, n_left)

    def _renew_if_starved(self) -> bool:
        """Replace the matcher if the texts of its grammar have used up the states, since a text
        must not fail because of others; return whether it was replaced."""
        if self._renew is None or not self._matcher.is_error():
            return False
        if _TOO_MANY_STATES not in self._matcher.get_error():
            return False
        self._matcher, self._renew = self._renew(), None
        self._matcher.consume_tokens(self._tokens)
        return True

    @property
    def complete(self) -> bool:
        """Whether the text so far matches."""
        return bool(self._matcher.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether no token is allowed any more."""
        return bool(self._matcher.is_stopped())


class _Grammar(NamedTuple):
    """A compiled grammar, of whose matcher each text gets a copy."""

    matcher: LLMatcher
    longest: int = 0  # of the shortest texts of the parts of JSON schemas, in characters, estimated
    notes: Sequence[str] = ()  # about what is not enforced of JSON schemas, with their places


@dataclass
class _Compiled:
    """A grammar in the cache; None: to be compiled again."""

    grammar: _Grammar | None = None


class _Tokens:
    """The tokenizer object that llguidance expects. An object of its own, because llguidance keeps
    it where Python's garbage collection cannot see a cycle."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        ends: Collection[int],
        encode: Callable[[bytes], Sequence[int]],
    ) -> None:
        self._encode = encode
        # One more token as the end of text, since not every vocabulary has one.
        self.tokens, self.eos_token_id = [*tokens, b""], len(tokens)
        self.bos_token_id, self.special_token_ids = None, [*sorted(ends), len(tokens)]

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Return the ids of a text; llguidance uses it for forced tokens.

        None for a text that the vocabulary cannot express: no token will be allowed there.
        """
        try:
            return self._encode(text.encode() if isinstance(text, str) else text)
        except UsageError:
            return []


class Grammars:
    """A factory of matchers for one vocabulary, which compiles each grammar once."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        ends: Collection[int],
        encode: Callable[[bytes], Sequence[int]],
    ) -> None:
        # To llguidance, the byte 255, which no text has, starts the name of a control token.
        tokens = [b"" if token[:1] == b"\xff" else token for token in tokens]
        self._tokens, self._encode = tokens, encode
        self._end, self._ends = len(tokens), sorted(ends)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokens, ends, encode)))
        self._compiled = lru_cache(maxsize=_MAX_COMPILED)(lambda *_: _Compiled())

    def matcher(self, sampling: SamplingConfig) -> Matcher:
        """Return a new matcher for the constraint of `sampling`.

        Raises UsageError if the constraint is invalid or allows no text.
        """
        key = _key(sampling)
        kind, grammar = key[0], self._get(*key)

        def renew() -> LLMatcher:
            self._compiled(*key).grammar = None
            return self.compile(*key).matcher

        guard = None
        if kind == "json_schema" or grammar.longest:
            guard = CompletionGuard(self._completer, grammar.longest, next(iter(self._ends), None))
        return Matcher(grammar.matcher.deep_copy(), self._end, self._ends, kind, renew, guard)

    def notes(self, sampling: SamplingConfig) -> Sequence[str]:
        """Return notes about what is not enforced of the JSON schemas of a valid constraint, each
        after its place in them."""
        return self._get(*_key(sampling)).notes

    def _get(self, kind: str, value: Any, ban: Sequence[str | bytes]) -> _Grammar:
        compiled = self._compiled(kind, value, ban)
        grammar = compiled.grammar  # once: another thread may remove it
        if grammar is None:
            grammar = compiled.grammar = self.compile(kind, value, ban)
        return grammar

    def compile(self, kind: str, value: Any, ban: Sequence[str | bytes]) -> _Grammar:
        """Compile a constraint of this kind; raises UsageError as `matcher`."""
        if kind == "json_schema":
            return self._compile_schema(value)
        if kind == "choices":
            value = _possible_choices(value, ban)
            self._check_expressible(value)
        if kind == "regex" and is_cut_off(value):
            raise _error(kind, CUT_OFF)
        lines: Sequence[int] = ()
        schemas = Translation()
        try:
            if kind == "grammar":
                value, lines, schemas = _to_lark(value)
        except ValueError as error:
            raise UsageError(f"{kind}: {error}", _CORRECT, field=kind) from None
        grammar = _to_llguidance(kind, value, self._missing_characters)
        return self._compile_checked(kind, grammar, schemas, lines)

    def _compile_schema(self, value: str | bytes, *, closed: bool = True) -> _Grammar:
        """Compile a JSON schema; not `closed`: with all properties that it allows."""
        translation, grammar = _translate(value, closed=closed)
        try:
            return self._compile_checked("json_schema", grammar, translation)
        except UsageError as error:
            if not closed or _NO_TEXT not in error.message:
                raise
        return self._compile_schema(value, closed=False)

    def _compile_checked(
        self, kind: str, grammar: str, schemas: Translation, lines: Sequence[int] = ()
    ) -> _Grammar:
        """Compile a grammar of llguidance; raises UsageError if it is invalid or allows no text."""
        matcher = self._compile(kind, grammar)
        if matcher.is_error():
            self._check_patterns(kind, schemas.patterns)
        _check(matcher, kind, lines)
        first = matcher.deep_copy()
        first.compute_bitmask()
        _check(first, kind)
        if matcher.is_stopped():
            raise _error(kind, _NO_TEXT)
        return _Grammar(matcher, schemas.longest, schemas.notes)

    def _compile(self, kind: str, grammar: str) -> LLMatcher:
        limits = _GRAMMAR_LIMITS if kind == "grammar" else _LIMITS
        return _on_large_stack(
            lambda: LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits), kind
        )

    def _check_patterns(self, kind: str, patterns: Mapping[str, str]) -> None:
        """Raise UsageError for the first invalid regular expression of a schema; by its path."""
        for pattern, path in patterns.items():
            alone = _schema_to_llguidance({"type": "string", "pattern": pattern})
            matcher = self._compile("json_schema", alone)
            if matcher.is_error():
                reason = _reason(matcher.get_error(), "regex")
                raise UsageError(f"{kind}: {path}: {reason}", _CORRECT_REGEX, field=kind)

    @cached_property
    def _completer(self) -> Completer:
        return Completer(self._tokens, self._tokenizer)

    @cached_property
    def _missing_characters(self) -> str:
        """A class of the characters with a first byte that is in no token; empty without any."""
        present = {byte for token in self._tokens for byte in token}
        ranges = [_characters_starting(byte) for byte in range(256) if byte not in present]
        pairs = "".join(rf"\x{{{r[0]:x}}}-\x{{{r[-1]:x}}}" for r in ranges if r)
        return pairs and f"[{pairs}]"

    def _check_expressible(self, choices: Sequence[str]) -> None:
        """Raise UsageError for a choice that no tokens spell; a text that starts it gets stuck."""
        for choice in choices:
            try:
                self._encode(choice.encode())
            except UsageError as error:
                raise UsageError(
                    f"choices: {choice[:40]!r}: {error.message}", error.hint, field="choices"
                ) from None


def _key(sampling: SamplingConfig) -> tuple[str, Any, Sequence[str | bytes]]:
    """Return the kind and the value of a constraint, and the bans that it depends on."""
    kind = next(name for name in CONSTRAINTS if getattr(sampling, name))
    return kind, getattr(sampling, kind), sampling.ban if kind == "choices" else ()


def _on_large_stack(compute: Callable[[], LLMatcher], kind: str) -> LLMatcher:
    """Return the result of a thread that has room for deep recursion.

    Raises UsageError after `_MAX_SECONDS`; the thread cannot be stopped, but Ctrl-C and the end of
    the process do not wait for it.
    """
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            result = in_daemon_thread(compute, name="constraint")  # it may take minutes
        finally:
            threading.stack_size(before)
    try:
        return result.result(_MAX_SECONDS)
    except TimeoutError:
        raise _error(kind, f"takes more than {_MAX_SECONDS} s to compile") from None


def _check(matcher: LLMatcher, kind: str, lines: Sequence[int] = ()) -> None:
    if matcher.is_error():
        raise _error(kind, _reason(matcher.get_error(), kind, lines))


def _error(kind: str, reason: str) -> UsageError:
    hint = {"grammar": _CORRECT, "regex": _CORRECT_REGEX}.get(kind, _SUPPORTED)
    if reason.startswith(_NO_TEXT):
        hint = "use one that some text matches"
    if reason.startswith("takes more") or "too many" in reason.lower():
        hint = "simplify it"
    return UsageError(f"{kind}: {reason}", hint, field=kind)


def _reason(error: str, kind: str, lines: Sequence[int] = ()) -> str:
    """Return the reason in an error of llguidance, without its grammar and positions there.

    `lines`: for each line of a Lark grammar, the line of the user's grammar, which is named.
    """
    text = error.partition("\n<state>")[0]
    if text.startswith("panic: "):
        return "llguidance fails for it"
    location = _LOCATION.match(text)
    if lines and location and int(location[1]) <= len(lines):
        reason = _reason(text.replace(location[0], "", 1), kind)
        return f"line {lines[int(location[1]) - 1]}: {reason}"
    if text == "NoExtensionBias":
        return _NO_TEXT
    if text.startswith("Unsatisfiable schema: "):
        text = f"{_NO_TEXT} ({text.removeprefix('Unsatisfiable schema: ')})"
    elif found := re.findall(r"^error: (.+)$", text, re.MULTILINE):  # of the regex parser
        text = found[-1]
    else:
        text = re.split(r"\n\s+\d+ \| ", text)[0]  # the lines of the grammar
        text = re.sub(r'^at \d+\(\d+\): (invalid regex ".*" \(in regex\): )?', "", text)
    if kind in ("grammar", "json_schema"):
        text = _PLAIN.get(text.strip(), text)
        text = text.partition("while processing json-schema:")[0]
        if text.startswith(("circular references", "Schema intersection stack level")):
            text = _MERGED
    return " ".join(text.split())[:200]


def _characters_starting(byte: int) -> range:
    """Return the characters whose UTF-8 starts with a byte; none for bytes in the middle."""
    if byte < 0x80:
        return range(byte, byte + 1)
    if 0xC2 <= byte < 0xE0:
        return range((byte & 0x1F) << 6, ((byte & 0x1F) + 1) << 6)
    if 0xE0 <= byte < 0xF0:
        end = 0xD800 if byte == 0xED else ((byte & 0x0F) + 1) << 12  # without surrogates
        return range(max((byte & 0x0F) << 12, 0x800), end)
    if 0xF0 <= byte < 0xF5:
        return range(max((byte & 0x07) << 18, 0x10000), min(((byte & 0x07) + 1) << 18, 0x110000))
    return range(0)


def _to_llguidance(kind: str, value: Any, missing_characters: str) -> str:
    if kind == "choices":
        # One terminal: llguidance limits the number of alternatives of a rule.
        texts = (json.dumps(text, ensure_ascii=False) for text in value)
        return "start: CHOICE\nCHOICE: " + " | ".join(texts)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(value)
    grammar: str = LLMatcher.grammar_from_regex(_ascii_classes(value))
    if missing_characters:  # a text that needs one of them would get stuck before it
        pattern = json.loads(grammar)["grammars"][0]["lark_grammar"].removeprefix("start: ")
        grammar = f"start: TEXT\nTEXT: {pattern} & ~/(?s:.*){missing_characters}(?s:.*)/"
    return grammar


def _ascii_classes(regex: str) -> str:
    r"""Return a regular expression whose \d, \w and \s are ASCII, as in JSON schemas, unless it
    asks for Unicode by the flag u."""
    if re.search(r"\(\?[a-zA-Z]*u", regex):
        return regex
    return re.sub(r"\\(.)", lambda m: _ASCII.get(m[1], m[0]), regex, flags=re.DOTALL)


def _schema_to_llguidance(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=ONE_LINE)


def _to_lark(grammar: str) -> tuple[str, Sequence[int], Translation]:
    """Return a Lark grammar, for each of its lines the line of `grammar`, and what is known about
    its JSON schemas, whose places begin with their lines.

    Raises ValueError for what cannot be converted, and for schemas that cannot be translated.
    """
    from tgen.generation.gbnf import gbnf_to_lark, is_gbnf

    _check_length(grammar)
    if is_gbnf(grammar):
        return *gbnf_to_lark(grammar), Translation()
    pieces: list[str] = []
    schemas = Translation()
    start = end = n_rules = 0
    while match := _LARK_TOKEN.search(grammar, end):
        end = match.end()
        n_rules += match["rule"] is not None
        if match["special"]:
            line = grammar.count("\n", 0, match.start()) + 1
            raise ValueError(f"line {line}: special tokens are not supported (got {match[0]})")
        if match["json"]:
            try:
                schema, after = json.JSONDecoder().raw_decode(grammar, end)
                lines = "\n" * grammar.count("\n", end, after)
                translation = translate(schema)
                pieces += [grammar[start:end], _inline(schema, translation.schema, lines)]
                line = grammar.count("\n", 0, match.start()) + 1
                place = f"line {line}: "
                schemas.notes += [place + note for note in translation.notes]
                schemas.patterns |= {p: place + path for p, path in translation.patterns.items()}
                schemas.longest = max(schemas.longest, translation.longest + _SYNTAX_CHARACTERS)
                start = end = after
            except json.JSONDecodeError as error:
                raise ValueError(f"line {error.lineno}: %json: {error.msg}") from None
            except (RecursionError, ValueError) as error:
                line = grammar.count("\n", 0, match.start()) + 1
                deep = isinstance(error, RecursionError)
                reason = "the nesting is too deep" if deep else error
                raise ValueError(f"line {line}: {reason}") from None
    if n_rules > _MAX_RULES:
        raise ValueError(f"too many rules (got {n_rules:,}, limit {_MAX_RULES:,})")
    lark = "".join([*pieces, grammar[start:]])
    return lark, range(1, lark.count("\n") + 2), schemas


def _inline(schema: Any, translated: Any, lines: str) -> str:
    """Return a JSON schema of a Lark grammar for llguidance, with as many line breaks."""
    key = "x-guidance"  # llguidance's options, such as white space
    options = {key: schema[key]} if isinstance(schema, dict) and key in schema else {}
    if not isinstance(translated, dict):
        translated = {"allOf": [translated]}
    return "{" + lines + json.dumps(translated | options)[1:]


def _translate(schema: str | bytes, *, closed: bool) -> tuple[Translation, str]:
    """Translate a JSON schema into a grammar of llguidance; raises UsageError."""
    try:
        _check_length(schema)
        translation = translate(json.loads(schema), closed=closed)
        return translation, _schema_to_llguidance(translation.schema)
    except SchemaError as error:
        reason, hint = str(error), error.hint
    except RecursionError:
        reason, hint = "the nesting is too deep", "use a valid JSON schema"
    except ValueError as error:
        reason, hint = str(error), "use a valid JSON schema"
    raise UsageError(f"json_schema: {reason}", hint, field="json_schema")


def _check_length(text: str | bytes) -> None:
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"too long (got {len(text):,} characters, limit {_MAX_CHARACTERS:,})")


def _possible_choices(choices: Sequence[str | bytes], ban: Sequence[str | bytes]) -> list[str]:
    """Return the choices that contain no banned string; a text that starts one would get stuck."""
    bans = [raw(text) for text in ban]
    texts = [text for text in map(raw, choices) if not any(banned in text for banned in bans)]
    if not texts:
        hint = "remove the banned string, or add a choice without it"
        raise UsageError("choices: each choice contains a string of ban", hint, field="choices ban")
    try:
        return [text.decode() for text in dict.fromkeys(texts)]
    except UnicodeDecodeError:
        raise UsageError(
            "choices is not UTF-8", "encode the choices in UTF-8", field="choices"
        ) from None
