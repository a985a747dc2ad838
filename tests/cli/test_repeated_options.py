"""Options that have no effect are named."""

import pytest

from tgen.cli.app import run


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["score", "--compare", "a", "--compare", "b", "c.txt"], "--compare"),
        (["generate", "-m", "a", "--model", "b"], "--model"),
        (["train", "a.txt", "--compile", "--no-compile", "--steps", "x"], "--compile"),
    ],
)
def test_a_value_that_does_not_count_is_a_warning(capsys, arguments, flag):
    assert run(arguments)
    expected = f"warning: {flag} is given twice: only the last value counts"
    assert expected in capsys.readouterr().err.splitlines()
    assert run([*arguments, "-q"])
    assert "warning" not in capsys.readouterr().err


def test_repeatable_options_and_equal_flags_are_no_warning(capsys):
    assert run(["generate", "-q", "--quiet", "--stop", "a", "--stop", "b", "--top-k", "x"]) == 2
    assert run(["generate", "--stop", "a", "--stop", "b", "--echo", "--echo", "--top-k", "x"]) == 2
    assert "warning" not in capsys.readouterr().err
