"""Chat templates: an unreadable template is ignored if it is optional."""

import pytest

from tgen.checkpoint.chat_template import chat_template_source, read_chat_template, special_tokens
from tgen.errors import TgenError


def test_unreadable_template_is_none(tmp_path):
    (tmp_path / "chat_template.jinja").mkdir()
    assert chat_template_source(tmp_path) is None
    assert special_tokens(tmp_path) == {}
    with pytest.raises(TgenError, match=r"chat_template\.jinja"):
        read_chat_template(tmp_path)
