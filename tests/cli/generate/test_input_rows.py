"""Rows of `--input`: a bad row becomes an error in its place, and the others are written."""

import json

import pytest

from support.command import tgen
from tgen.cli.generate.input_rows import check_row, parse_object
from tgen.config import SamplingConfig
from tgen.errors import UsageError

HOSTILE = [
    '{"prompt": "a", "id": 1e999}',
    '{"prompt": "a", "id": -1e999}',
    '{"prompt": "a", "id": NaN}',
    '{"prompt": "a", "id": [{"x": [Infinity]}]}',
    '{"prompt": "a", "id": {"x": -Infinity}}',
    '{"prompt": "a", "id": ' + "9" * 5000 + "}",
    '{"prompt": "a", "id": ' + "[" * 900 + "]" * 900 + "}",
    '{"prompt": "a", "id": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"prompt": "a", "json_schema": ' + '{"not": ' * 800 + "{}" + "}" * 800 + "}",
    '{"prompt": "a", "temperature": 1e999}',
    '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
    '{"prompt": "a", "bias": {"a": 1' + "0" * 400 + "}}",
    '{"prompt": "a", "bias": {"a": 1e999}}',
    '{"prompt": "a", "ban": ' + json.dumps(["x"] * 5000) + "}",
]
RETURNED = [
    '"\\ud800"',
    '{"\\udfff": ["\\ud83d", null, true]}',
    "9" * 4000,
    "[" * 90 + "]" * 90,
    "-0.0",
    "1e308",
]


def read_row(line):
    values = parse_object(line.encode())
    values.pop("id", None)
    return SamplingConfig(**check_row(values, samples=1, echo=False).sampling)


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_row_is_a_usage_error(line):
    with pytest.raises(UsageError) as error:
        read_row(line)
    assert error.value.message
    assert error.value.hint


def test_hostile_rows_become_errors_in_their_places_and_ids_return(trained):
    good = [f'{{"prompt": "a", "id": {one}}}' for one in RETURNED]
    lines = [*HOSTILE, *good, '{"prompt": "b"}']
    command = ["generate", "-m", trained, "-n", 2, "--input", "-", "--jsonl", "-q"]
    result = tgen(*command, stdin="\n".join(lines).encode())
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 1
    assert [one["row"] for one in records] == list(range(len(lines)))
    assert ["error" in one for one in records] == [True] * len(HOSTILE) + [False] * 7
    assert [json.dumps(one["id"]) for one in records[len(HOSTILE) : -1]] == [
        json.dumps(json.loads(one)) for one in RETURNED
    ]
    assert result.stderr.count(b"error: line ") == len(HOSTILE)
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt is given twice", "remove one of them"),
        ('{"prompt": "a", "id": {"x": 1, "x": 2}}', "x is given twice", "remove one of them"),
        ('{"Prompt": "a"}', "unknown field 'Prompt'", "did you mean prompt?"),
        (
            '{"prompt": "a", "cache_dtype": "int8"}',
            "cache_dtype applies to all rows",
            "set it on the command line",
        ),
        ('{"PROMPT": "a"}', "unknown field 'PROMPT'", "did you mean prompt?"),
        (
            '{"prompt": "a", "top_k": true}',
            "top_k: invalid value True",
            "set top_k to a whole number",
        ),
        (
            json.dumps({"prompt": "a", "stop": {"a": "b" * 1000}}),
            "stop: invalid value {'a': '" + 53 * "b",
            "set stop to a string or a list of strings",
        ),
        (
            '{"prompt": "a", "stop": ["b", 1]}',
            "stop: invalid value 1",
            "set stop to text",
        ),
        (
            '{"prompt": "a", "explain": 1}',
            "explain: invalid value 1",
            "set explain to true or false",
        ),
        (
            '{"prompt": "a", "bias": {"b": false}}',
            "bias: invalid value False",
            "set bias to a number from -1e6 to 1e6",
        ),
        (
            '{"prompt": "a", "samples": 1.0}',
            "samples: invalid value 1.0",
            "set samples to a whole number from 1 to 65,536",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": ["b"]}]}',
            'messages[1]: invalid value {"role": "user", "content": ["b"]}',
            "set messages[1] to an object with role and content, two strings",
        ),
        (
            '{"prompt_bytes": "YQ==", "messages": []}',
            "messages and prompt_bytes are both given",
            "remove one of them",
        ),
    ],
)
def test_invalid_fields_are_refused(line, message, hint):
    with pytest.raises(UsageError) as error:
        read_row(line)
    assert (error.value.message, error.value.hint) == (message, hint)


def test_null_is_no_value():
    line = '{"prompt": null, "prompt_bytes": null, "messages": [{"role": "user", "content": "a"}]}'
    row = check_row(parse_object(line.encode()), samples=1, echo=False)
    assert (row.prompt, row.messages) == (b"a", [{"role": "user", "content": "a"}])
    line = '{"prompt": "a", "prompt_bytes": null, "messages": null, "temperature": 1}'
    row = check_row(parse_object(line.encode()), samples=2, echo=True)
    assert (row.prompt, row.messages, row.samples, row.echo) == (b"a", None, 2, True)
    assert row.sampling == {"temperature": 1}
    line = '{"prompt": "a", "temperature": null, "samples": null, "echo": null, "regex": null}'
    row = check_row(parse_object(line.encode()), samples=2, echo=True)
    assert (row.samples, row.echo, row.sampling) == (2, True, {"regex": None})


def test_summary_counts_failed_rows(trained):
    rows = b'{"prompt": "a"}\n{}\n{"prompt": "b", "regex": "[a-z]{40}", "samples": 2}\n'
    command = ["generate", "-m", trained, "-n", 2, "--input", "-"]
    assert b"3 rows (2 failed) \xc2\xb7 6 tokens" in tgen(*command, stdin=rows).stderr
    assert b"1 row \xc2\xb7 2 tokens" in tgen(*command, stdin=rows[:16]).stderr
