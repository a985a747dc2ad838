"""Grammars in Lark and GBNF: what is generated parses, errors name the line, nothing hangs."""

import ast
import json
import re

import pytest

from support.command import tgen
from tgen.errors import UsageError
from tgen.python_api import load

lark = pytest.importorskip("lark", reason="lark is not installed")

RECIPE = r"""
// A list of ingredients, and steps that may be nested.
start: title "\n" item+ step{1,3}
title: NAME " " NAME
item: "- " AMOUNT " " UNIT " of " NAME "\n"
step: "(" NAME step? ")"
NAME: /[a-z]{2,6}/
UNIT: "g" | "cup" | "pinch"
AMOUNT: /[1-9][0-9]{0,2}/
"""
SUM = r"""
# Sums of numbers, with nested parentheses.
root ::= expression "\n"
expression ::= term ([-+*\x2f] term){0,3}
term ::= number | "(" expression ")" |
    "-" term  # a trailing bar continues on the next line
number ::= [1-9] [0-9]{0,2} | "0"
"""
OPTIONS = {"temperature": 3.0, "max_new_tokens": 400}


@pytest.fixture(scope="module")
def model(trained):
    return load(trained, threads=1)


def generate_complete(model, grammar, seeds):
    """Return the texts that end by themselves; the others, cut off, are no texts of the grammar."""
    loaded, texts = model._loaded, []
    for seed in range(seeds):
        sampling = loaded.sampling({"grammar": grammar, "seed": seed, **OPTIONS})
        tokens = list(loaded.tokens([model.encode("a")], sampling=sampling))
        if tokens[-1].finish == "stop":
            assert tokens[-1].complete
            texts.append(b"".join(token.text for token in tokens).decode())
    assert len(set(texts)) > seeds // 2
    return texts


def test_texts_of_a_lark_grammar_parse_with_lark(model):
    parser = lark.Lark(RECIPE.replace("{1,3}", "~1..3"), parser="earley", lexer="dynamic_complete")
    for text in generate_complete(model, RECIPE, 30):
        assert parser.parse(text)


def test_texts_of_a_gbnf_grammar_are_sums(model):
    for text in generate_complete(model, SUM, 30):
        assert re.fullmatch(r"[-+*/()0-9]+\n", text)
        tree = ast.parse(text.strip(), mode="eval")  # as Python reads sums: no leading zeros
        kinds = {type(node) for node in ast.walk(tree.body)}
        allowed = {ast.BinOp, ast.UnaryOp, ast.Constant, ast.USub}
        assert kinds <= allowed | {ast.Add, ast.Sub, ast.Mult, ast.Div}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\x41\u00e9\U0001F98B\t\n\"\\[]"', 'Aé🦋\t\n"\\[]'),
        (r'root ::= "a\u0001b"', "a\x01b"),
        (r'root ::= ("a\u0001b" "-"){2}', "a\x01b-a\x01b-"),
        (r'root ::= [&] [~] [^\x00-`b-\U0010ffff] [.-.] "."', "&~a.."),
        ('root ::= [--]{2}"]"[\\]] [[]', "--]]["),
        ('root ::= [a] # "]"\n', "a"),
        ("root ::= [&&]{2} [~~] [^\\x00-Z\\x5c-\U0010ffff]", "&&~["),
        ("root::=r-1\r\nr-1 ::= [z]\r\n", "z"),
        ('fooBar ::= "x"\nroot ::= fooBar', "x"),
        ('root ::= a-b a_B\na-b ::= "x"\na_B ::= "y"\n', "xy"),
        ('root ::= start _id 01-key-kv "-"\nstart ::= "s"\n_id::="i"\n01-key-kv ::= "k"', "sik-"),
        ('root ::= "m" ([x]{2}){2} (("a"{2})){1,1} ((b{1})?){2,2}\nb ::= "b"', "mxxxxaabb"),
        ('root ::= "a" "b"{0} ("c" "d"){0,0} "e"{ 2 , 2 }', "aee"),
    ],
)
def test_gbnf_is_read_as_llama_cpp_reads_it(model, grammar, text):
    assert model.generate("a", grammar=grammar, max_new_tokens=60) == text


def test_any_character_of_gbnf_includes_line_breaks(model):
    texts = {
        model.generate("a", grammar="root ::= .", seed=seed, temperature=3, top_k=0)
        for seed in range(40)
    }
    assert all(len(text) == 1 for text in texts)
    assert model.generate("a", grammar="root ::= .", bias={"\n": 99}) == "\n"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: "a"\nb: "c', "line 2: a character is not expected here, or a string is not"),
        (
            'start: "a"\n  <|endoftext|>',
            "line 2: special tokens are not supported (got <|endoftext|>)",
        ),
        ('begin: "yes"', "the grammar has no rule named start"),
        ('start: "a"\nb: "c"\n  | nothing\nstart: b', "line "),
        ("start: A\n\nA: /(/\n", "line 3: unclosed group"),
        ('a: "b"\n', "start"),
        ('root ::= "a"\nb ::= c\n', "line 2: there is no rule c"),
        ('root ::= "a\n', "line 1: '\"' is not closed on its line"),
        ('root ::= "a"\n\nb ::= ["a"\n', "line 3: '[' is not closed on its line"),
        ('root ::= "a" %\n', "line 1: '%' is not expected here"),
        ('root ::= "\\q"', "line 1: unknown escape \\q"),
        ("root ::= [\\d]", "line 1: unknown escape \\d"),
        ('root ::= "\\ud800"', "line 1: \\ud800 is not a character"),
        ("root ::= [z-a]", "line 1: the range from 'z' to 'a' is empty"),
        ("root ::= []", "line 1: [] is empty"),
        ('root ::= ("a"\n', "line 2: expected ')'"),
        ('root ::= "a" )\n', "line 1: expected name"),
        ('root ::= "a"{2\n', "line 1: '{' is not expected here"),
        ('\nroot ::= "a"{3,2}\n', "line 2: "),
        ('a ::= "b"\n', "no rule named root"),
        (
            'root ::= a-b\na-b ::= "x"\na-b ::= "y"\n',
            "line 3: a-b is defined again, first on line 2",
        ),
        ('start: %json {"const": -9223372036854775808}', "line 1: const: a number is beyond 9e+18"),
        ('start: "a"\nb: %json {"a" 1}', "line 2: "),
    ],
)
def test_errors_name_the_line(model, grammar, message):
    with pytest.raises(UsageError) as error:
        model.generate("a", grammar=grammar)
    assert error.value.message.startswith("grammar: ")
    assert message in error.value.message
    assert error.value.hint


def chain(n, nesting=0):
    """Return a grammar of rules of which each refers to the next."""
    rules = [f"r{i}: {'(' * nesting}r{i + 1}{')' * nesting}" for i in range(n)]
    return "\n".join(["start: r0", *rules, f'r{n}: "x"'])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "grammar: the nesting is too deep"),
        ("root ::= " + "[a] " * 20_000, "grammar: too long"),
        ("\n".join(f'r{i} ::= r{i + 1} "x"' for i in range(600)), "too many rules (limit 500)"),
        (chain(3000), "grammar: too many rules (got 3,002, limit 2,000)"),
        ("start: " + "(" * 60_000 + '"a"' + ")" * 60_000, "grammar: "),
        ("start: " + '"a"? ' * 250_000, "grammar: "),
        ("start: %json " + "[" * 100_000, "grammar: "),
    ],
)
def test_grammars_of_any_size_are_refused_in_time(model, grammar, message):
    with pytest.raises(UsageError) as error:
        model.generate("a", grammar=grammar)
    assert message in error.value.message


@pytest.mark.parametrize("nesting", [0, 25])
def test_a_long_chain_of_rules_is_no_stack_overflow(model, nesting):
    assert model.generate("a", grammar=chain(1990, nesting), max_new_tokens=2) == "x"


def test_a_long_chain_of_references_in_a_schema_is_no_stack_overflow(model):
    chained = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    definitions = chained | {"d20000": {"enum": ["x"]}}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    assert model.generate("a", json_schema=schema) == '"x"'
    with pytest.raises(UsageError, match="json_schema: too long"):
        model.generate("a", json_schema={"enum": ["x" * (1 << 20)]})


def test_an_ambiguous_grammar_fails_before_a_token_takes_long(model):
    grammar = 'start: x\nx: "a" | x x | x x x'
    with pytest.raises(UsageError, match=r"grammar: Parser Error: Current row has 50. items"):
        model.generate("a", grammar=grammar, max_new_tokens=400, bias={"a": 99})


def test_grammar_from_a_file_a_row_and_python_is_the_same(trained, tmp_path):
    (tmp_path / "sum.gbnf").write_text("\ufeff" + SUM, encoding="utf-8")
    row = json.dumps({"prompt": "a", "grammar": SUM})
    common = ["generate", "-m", trained, "-q", "--seed", 1, "-n", 400]
    file = tgen(*common, "-p", "a", "--grammar", tmp_path / "sum.gbnf")
    assert file.returncode == 0, file.stderr.decode()
    rows = tgen(*common, "--input", "-", stdin=row.encode())
    assert rows.stdout.rstrip() == file.stdout.rstrip()
    text = load(trained).generate("a", grammar=SUM, seed=1, max_new_tokens=400)
    assert file.stdout.decode() == text
    wrong = tmp_path / "wrong.lark"
    wrong.write_text('start: "a" b\n')
    result = tgen(*common, "-p", "a", "--grammar", wrong)
    assert result.returncode == 2
    assert result.stderr.decode().startswith(f"error: --grammar {wrong}: line 1: ")


@pytest.mark.parametrize("grammar", ["root ::= {}", 'root ::= "a" b\nb ::= ({}\n) b?'])
def test_gbnf_may_have_thousands_of_alternatives(model, grammar):
    words = [f"w{i}x" for i in range(4000)]
    text = model.generate("a", grammar=grammar.format(" | ".join(f'"{w}"' for w in words)))
    assert text.removeprefix("a").split("x")[0] + "x" in words


def test_json_schemas_in_lark_grammars_are_closed_and_keep_their_options(model):
    schema = (
        '{"type": "object",\n "x-guidance": {"whitespace_flexible": false},\n "properties": %s}'
    )
    grammar = f'start: "a " j\nj: %json {schema % "{}"} "!"\n'
    assert model.generate("a", grammar=grammar, max_new_tokens=20) == "a {}!"
    wrong = grammar.replace("{}}", '{"b": {"uniqueItems": true}}}')
    with pytest.raises(UsageError, match=r"line 2: properties\.b: uniqueItems is not supported"):
        model.generate("a", grammar=wrong)
