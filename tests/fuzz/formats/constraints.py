"""JSON schemas, regular expressions and grammars: compiled, and some tokens generated."""

from pathlib import Path
from random import Random
from typing import Any

from fuzz.models import save_model
from fuzz.mutations import ESCAPES, Mutator, dump
from tgen.config import EngineOptions, SamplingConfig
from tgen.loaded_model import open_model

_SCHEMAS: list[dict[str, Any]] = [
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120, "multipleOf": 2},
            "tags": {
                "type": "array",
                "items": {"enum": ["a", "b", 1, None]},
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "anyOf": [{"$ref": "#/$defs/node"}, {"const": 1.5}, {"type": ["null", "boolean"]}],
    },
    {
        "oneOf": [
            {"type": "number", "exclusiveMinimum": 0.5},
            {"type": "string", "format": "date-time"},
        ],
        "prefixItems": [{"allOf": [{"type": "integer"}, {"minimum": 3}]}],
        "patternProperties": {"^x-": {"not": {"type": "string"}}},
        "dependentRequired": {"a": ["b"]},
    },
]
_PIECES = [
    *("a", "[a-c]", "[^x]", ".", r"\d", r"\w+", r"\p{L}", r"\x1b", r"\u{1F980}", "é", "日", "\0"),
    *(ESCAPES,),
    *("(", ")", "[", "]", "{", "}", "{2}", "{0}", "{1,}", "{1000000}", "{99999999999}", "{3,1}"),
    *("{,5}",),
    *("*", "+", "?", "*?", "|", "^", "$", r"\b", r"\1", "(?i)", "(?=a)", "(?!a)", "(?<=a)"),
    *("(?P<n>a)",),
    *("(a+)+", "(a|a)*", "(x+x+)+y", "(.*){20}", "((a{0,99}){0,99}){0,99}", "[a-z]{1,5000}"),
    *("\\", r"\Q", "/"),
    *("[[:alpha:]]", "[a&&b]", "(?s:.)", "(?-u:\\xff)", "a" * 3000, "(" * 300 + "a" + ")" * 300),
    *("(a|" * 60,),
]  # fmt: skip
_REGEXES = [
    r"[a-z]+@[a-z]{2,5}\.com",
    r"(yes|no|maybe)?( \d{1,3})*",
    r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2})?",
]
_GRAMMARS = [
    'start: item+ /[.!]/\nitem: "a"i | NAME "," | %json {"type": "boolean"}\nNAME: /[a-z]{1,3}/\n',
    '%import common.INT\n%ignore / /\nstart: sum\nsum: INT | sum "+" sum | "(" sum ")"\n',
    'root ::= item+ [.!]\nitem ::= "a\\x41" | name "," # comment\nname ::= [a-z]{1,3} | "é"\n',
    'root ::= sum\nsum ::= [0-9]+ | sum "+" sum |\n  "(" sum ")"\n',
]
_GRAMMAR_PIECES = [
    *_PIECES,
    *(
        "\n",
        " | ",
        " ::= ",
        ": ",
        '"',
        "[",
        "]",
        "{2,3}",
        "{3,2}",
        "~1..2",
        "#",
        "//",
        "(",
        ")",
        "-",
    ),
    *("root", "start", "item", "NAME", "<[1]>", "<[*]>", "<|end|>", "@a", "%json {}", "%regex {}"),
    *('%json {"const": -9223372036854775808}', "%llguidance {}", "%lark {", "%import x.Y", "_: "),
    *('x: "a" | x x | x x x\n', 'a ::= a "x" | ""\n', "%ignore /a*/\n", "[lazy]", '[suffix="b"]'),
    *("[temperature=1]", "[max_tokens=2]", '[stop="a"]', "\\u0041", "\\U0010ffff", "\\ud800"),
]
_CHOICES = [["yes", "no"], ["a", "ab", "abc"], ["é", "日本"]]
_N_TOKENS = 6


class Constraints:
    """A constraint that is changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        save_model(folder / "model", "llama", context_length=32)
        self._model = open_model(folder / "model", EngineOptions(device="cpu", threads=1))
        self._ids = self._model.encode(b"a")
        self._schemas = [Mutator(schema) for schema in _SCHEMAS]
        self._choices = [Mutator(choices) for choices in _CHOICES]
        self._constraint: dict[str, Any] = {}

    def change(self, i: int, rng: Random) -> str:
        """Change a schema, a regular expression or a list of choices."""
        if i % 10 == 9:
            document, what = self._choices[i // 10 % len(self._choices)].change(i // 30, rng)
            self._constraint = {"choices": document}
        elif i % 10 in (7, 8):
            text = _insert(rng.choice(_GRAMMARS), _GRAMMAR_PIECES, rng)
            self._constraint, what = {"grammar": text}, repr(text)
        elif i % 10 < 5:
            document, what = self._schemas[i % len(self._schemas)].change(i // 2, rng)
            text = dump(document).decode("utf-8", "surrogateescape")
            self._constraint = {"json_schema": text}
        else:
            text = _insert(rng.choice(_REGEXES), _PIECES, rng)
            self._constraint, what = {"regex": text}, repr(text)
        return f"{next(iter(self._constraint))}: {what}"

    def read(self) -> None:
        """Generate some tokens."""
        sampling = SamplingConfig(max_new_tokens=_N_TOKENS, seed=3, **self._constraint)
        for _ in self._model.tokens([self._ids], sampling=sampling):
            pass


def _insert(text: str, pieces: list[str], rng: Random) -> str:
    """Insert some of the pieces, or replace parts of the text by them."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = rng.choice((at, at, end))
        text = text[:at] + rng.choice(pieces) + text[end:]
    return text
