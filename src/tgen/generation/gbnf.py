"""GBNF, llama.cpp's format of grammars, as a Lark grammar.

llguidance converts the rules. Strings and character classes are rewritten before: Lark's strings
have fewer escapes than those of GBNF, and a regular expression gives more characters a meaning.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from llguidance.gbnf_to_lark import GbnfToLarkError
from llguidance.gbnf_to_lark import gbnf_to_lark as convert

# The conversion takes quadratic time: up to some seconds within these limits.
_MAX_CHARACTERS = 1 << 16
_MAX_RULES = 500
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""
      (?P<space>   [ \t\r\n]+ )
    | (?P<bar>     \| )
    | (?P<open>    \( )
    | (?P<close>   \) )
    | (?P<times>   [*+?] | \{ \s* (?P<least>[0-9]+) \s* (?P<most>, \s* [0-9]* \s* )? \} )
    | (?P<comment> \#[^\n]* )
    | (?P<string>  "(?:\\.|[^"\\\n])*" )
    | (?P<class>   \[(?:\\.|[^\]\\\n])*\] )
    | (?P<any>     \. )
    | (?P<name>    [A-Za-z0-9_-]+ ) (?P<defined> [ \t]*::= )?
    | (?P<unknown> . )
    """,
    re.VERBOSE,
)
_MAX_INLINE = 100  # alternatives in a group; with more, they become a rule, and so a terminal
_HEX = r"x(?P<x>[0-9A-Fa-f]{2}) | u(?P<u>[0-9A-Fa-f]{4}) | U(?P<U>[0-9A-Fa-f]{8})"
_CHARACTER = re.compile(rf"\\(?: {_HEX} | (?P<sign>.) ) | [^\\]", re.VERBOSE)
_SIGNS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_IN_STRING = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ANY_CHARACTER = "[\\x00-\U0010ffff]"


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF, which defines rules by `::=`, and not in Lark."""
    return _RULE.search(text) is not None


def gbnf_to_lark(text: str) -> tuple[str, list[int]]:
    """Return a GBNF grammar in Lark, and the line in GBNF of each line in Lark. Raises ValueError
    with the line of the first error."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"too long (got {len(text):,} characters, limit {_MAX_CHARACTERS:,})")
    rewriter = _Rewriter()
    for match in _TOKEN.finditer(text):
        try:
            rewriter.add(match)
        except ValueError as error:
            raise ValueError(f"line {rewriter.line}: {error}") from None
    for name, where in rewriter.used:
        if name not in rewriter.defined:
            raise ValueError(f"line {where}: there is no rule {name}")
    if "root" not in rewriter.defined:
        raise ValueError("the grammar has no rule named root")
    try:
        lark = convert(rewriter.text())
    except GbnfToLarkError as error:
        where = error.pos.text.count("\n", 0, error.pos.pos) + 1
        reason = str(error).partition(" at line ")[0]
        raise ValueError(f"line {where}: {reason[:1].lower()}{reason[1:]}") from None
    except RecursionError:
        raise ValueError("the nesting is too deep") from None
    return lark, _source_lines(lark, rewriter.lines)


@dataclass
class _Group:
    """Parentheses, or the right side of a rule: what is known of its elements so far."""

    start: int  # of the piece after the parenthesis
    elements: int = 0
    bars: int = 0
    last: int = 0  # the first piece of the last element
    repeated: bool = False  # whether the last element is repeated


class _Rewriter:
    """Writes the tokens of a grammar as the converter should read them: rules have numbers for
    names, and groups for which it drops the parentheses have an empty string, too."""

    def __init__(self) -> None:
        self.line = 1
        self.defined: dict[str, int] = {}  # the line of each rule
        self.used: list[tuple[str, int]] = []  # names and their lines
        self.lines = {"start": 1}  # by name in Lark
        self._names = {"root": "root"}
        self._pieces: list[str] = []
        self._groups = [_Group(0)]
        self._rule = ""
        self._more: list[str] = []  # further rules

    def add(self, match: re.Match[str]) -> None:
        """Append a token; raises ValueError if it is not allowed."""
        text, kind = match[0], match.lastgroup
        group = self._groups[-1]
        if match["defined"]:
            self._define(match["name"])
        elif match["name"]:
            self.used.append((text, self.line))
            self._element(self._name(text))
        elif kind == "open":
            self._element("(")
            self._groups.append(_Group(len(self._pieces)))
        elif kind == "close" and len(self._groups) > 1:
            self._close(self._groups.pop())
        elif match["times"]:
            self._repeat(match)
        elif kind == "string":
            self._element(_string(text[1:-1]))
        elif kind == "class":
            self._element(_character_class(text[1:-1]))
        elif kind == "any":
            self._element(_ANY_CHARACTER)
        elif kind == "unknown":
            problem = "is not closed on its line" if text in '"[' else "is not expected here"
            raise ValueError(f"{text!r} {problem}")
        elif kind != "comment":
            group.bars += kind == "bar"
            self._pieces.append(text)
        self.line += text.count("\n")

    def text(self) -> str:
        """Return the grammar."""
        self._hoist_root()
        return "".join([*self._pieces, *(["\n"] if self._more else []), *self._more])

    def _element(self, piece: str) -> None:
        group = self._groups[-1]
        group.elements, group.last, group.repeated = group.elements + 1, len(self._pieces), False
        self._pieces.append(piece)

    def _close(self, group: _Group) -> None:
        outer = self._groups[-1]
        outer.repeated = group.elements == 1 and group.repeated
        self._hoist(group)
        self._pieces.append(")")

    def _repeat(self, match: re.Match[str]) -> None:
        group = self._groups[-1]
        most = (match["most"] or "").strip(", \t\r\n")
        if match["least"] and int(match["least"]) == 0 and (not match["most"] or most == "0"):
            self._pieces[group.last :] = ['""']
            return
        if group.repeated and self._pieces[-1] == ")":
            self._pieces[-1] = ' "")'
        group.repeated = True
        self._pieces.append(match[0])

    def _hoist(self, group: _Group) -> None:
        """Make a rule of the alternatives of a group if they are many."""
        if group.bars > _MAX_INLINE:
            name, body = self._name(f" {len(self._names)}"), "".join(self._pieces[group.start :])
            one_line = re.sub(r"[\r\n]", " ", body)
            self._more.append(f"{name} ::= {one_line}\n")
            self.lines[name] = self.line
            self._pieces[group.start :] = [name, "\n" * body.count("\n")]

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _define(self, name: str) -> None:
        self._hoist_root()
        if len(self.defined) >= _MAX_RULES:
            raise ValueError(f"too many rules (limit {_MAX_RULES})")
        known = self.defined.setdefault(name, self.line)
        if known != self.line:
            raise ValueError(f"{name} is defined again, first on line {known}")
        self._rule = self._name(name)
        self._pieces.append(f"{self._rule} ::=")
        self.lines["start" if name == "root" else self._rule] = self.line
        self._groups = [_Group(len(self._pieces))]

    def _hoist_root(self) -> None:
        if self._rule == "root":  # other rules become terminals anyway
            self._hoist(self._groups[0])


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


def _source_lines(lark: str, defined: Mapping[str, int]) -> list[int]:
    """Return for each line of the Lark grammar the line of its rule."""
    lines = [1]
    for text in lark.split("\n"):
        name = text.partition(":")[0].lower()
        lines.append(defined.get(name, lines[-1]))
    return lines[1:]
