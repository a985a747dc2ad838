"""TgenError: one line of limited length."""

from tgen.errors import ModelError


def test_long_message_loses_its_middle():
    error = ModelError("unknown type " + "x" * 200_000 + " in config.json", "y" * 200_000)
    assert error.message.startswith("unknown type xxx")
    assert error.message.endswith("xxx in config.json")
    assert str(error) == error.message
    assert max(len(error.message), len(error.hint)) < 1000
    assert ModelError("z" * 1000).message == "z" * 1000
