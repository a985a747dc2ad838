"""GBNF, llama.cpp's format of grammars, as a Lark grammar.

llguidance converts the rules. Strings and character classes are rewritten before: Lark's strings
have fewer escapes than those of GBNF, and a regular expression gives more characters a meaning.
"""

import re
from collections import deque
from typing import NamedTuple

from llguidance.gbnf_to_lark import GbnfToLarkError
from llguidance.gbnf_to_lark import gbnf_to_lark as convert

# The conversion takes quadratic time: up to some seconds within these limits.
_MAX_CHARACTERS = 1 << 16
_MAX_RULES = 500
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""
      (?P<symbol>  [ \t\r\n]+ | [0-9]+ | [|()*+?{},] )
    | (?P<comment> \#[^\n]* )
    | (?P<string>  "(?:\\.|[^"\\\n])*" )
    | (?P<class>   \[(?:\\.|[^\]\\\n])*\] )
    | (?P<any>     \. )
    | (?P<name>    [A-Za-z][A-Za-z0-9_-]* ) (?P<defined> [ \t]*::= )?
    | (?P<unknown> . )
    """,
    re.VERBOSE,
)
_HEX = r"x(?P<x>[0-9A-Fa-f]{2}) | u(?P<u>[0-9A-Fa-f]{4}) | U(?P<U>[0-9A-Fa-f]{8})"
_CHARACTER = re.compile(rf"\\(?: {_HEX} | (?P<sign>.) ) | [^\\]", re.VERBOSE)
_SIGNS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_IN_STRING = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ANY_CHARACTER = "[\\x00-\U0010ffff]"


class LarkGrammar(NamedTuple):
    """A Lark grammar, and for each of its lines the number of the line that it was made from."""

    text: str
    lines: list[int]


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF, which defines rules by `::=`, and not in Lark."""
    return _RULE.search(text) is not None


def gbnf_to_lark(text: str) -> LarkGrammar:
    """Convert a grammar from GBNF to Lark. Raises ValueError with the line of the first error."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"too long (got {len(text):,} characters, limit {_MAX_CHARACTERS:,})")
    defined: dict[str, int] = {}  # the line of each rule, by its name in Lark
    used: list[tuple[str, int]] = []  # names and their lines
    pieces, line = [], 1
    for match in _TOKEN.finditer(text):
        try:
            pieces.append(_rewrite(match))
            if match["defined"]:
                _define(match["name"], line, defined)
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from None
        if match["name"]:
            used.append((match["name"], line))
        line += match[0].count("\n")
    for name, where in used:
        if _lark_name(name) not in defined:
            raise ValueError(f"line {where}: there is no rule {name}")
    if "start" not in defined:
        raise ValueError("the grammar has no rule named root")
    try:
        lark = convert("".join(pieces))
    except GbnfToLarkError as error:
        where = error.pos.text.count("\n", 0, error.pos.pos) + 1
        reason = str(error).partition(" at line ")[0]
        raise ValueError(f"line {where}: {reason[:1].lower()}{reason[1:]}") from None
    except RecursionError:
        raise ValueError("the nesting is too deep") from None
    return LarkGrammar(lark, _source_lines(lark, defined))


def _rewrite(match: re.Match[str]) -> str:
    """Return a token as the converter should read it."""
    text, kind = match[0], match.lastgroup
    if kind == "string":
        return _string(text[1:-1])
    if kind == "class":
        return _character_class(text[1:-1])
    if kind == "unknown":
        problem = "is not closed on its line" if text in '"[' else "is not expected here"
        raise ValueError(f"{text!r} {problem}")
    return {"comment": "", "any": _ANY_CHARACTER}.get(kind or "", text)


def _string(body: str) -> str:
    """Return a string of Lark; control characters become classes between its parts."""
    pieces = ['"']
    for match in _CHARACTER.finditer(body):
        character = _decode(match)
        if character in _IN_STRING or character.isprintable() or character > "\x7f":
            pieces.append(_IN_STRING.get(character, character))
        else:
            pieces.append(f'" [{_in_class(character)}] "')
    return f'({"".join(pieces)}")'


def _character_class(body: str) -> str:
    """Return a character class of a regular expression in which only `-` and `^` have a meaning."""
    negation = "^" if body.startswith("^") else ""
    matches = deque(_CHARACTER.finditer(body.removeprefix("^")))
    if not matches:
        if negation:
            return _ANY_CHARACTER
        raise ValueError("[] is empty")
    pieces = []
    while matches:
        low = high = _decode(matches.popleft())
        if len(matches) > 1 and matches[0][0] == "-":
            matches.popleft()
            high = _decode(matches.popleft())
        if high < low:
            raise ValueError(f"the range from {low!r} to {high!r} is empty")
        pieces.append(_in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}")
    return f"[{negation}{''.join(pieces)}]"


def _decode(match: re.Match[str]) -> str:
    """Return the character of a match of `_CHARACTER`."""
    if match["sign"]:
        if match["sign"] not in _SIGNS:
            raise ValueError(f"unknown escape {match[0]}")
        return _SIGNS[match["sign"]]
    if not match[0].startswith("\\"):
        return match[0]
    code = int(match["x"] or match["u"] or match["U"], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{match[0]} is not a character")
    return chr(code)


def _in_class(character: str) -> str:
    """Return a character as a class of a regular expression has it."""
    is_plain = character.isalnum() or character > "\x7f"
    return character if is_plain else f"\\x{ord(character):02x}"


def _define(name: str, line: int, defined: dict[str, int]) -> None:
    if len(defined) >= _MAX_RULES:
        raise ValueError(f"too many rules (limit {_MAX_RULES})")
    known = defined.setdefault(_lark_name(name), line)
    if known != line:
        same = "llguidance ignores case and the difference of - and _"
        raise ValueError(f"{name} is defined again, first on line {known} ({same})")


def _lark_name(name: str) -> str:
    """Return the name that the converter gives a rule, in lower case."""
    if name == "root":
        return "start"
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()


def _source_lines(lark: str, defined: dict[str, int]) -> list[int]:
    """Return for each line of the Lark grammar the line of its rule."""
    lines = [1]
    for text in lark.split("\n"):
        name = text.partition(":")[0].lower()
        lines.append(defined.get(name, lines[-1]))
    return lines[1:]
