"""Token labels are printable, whatever the bytes."""

from support.tokens import HOSTILE
from tgen.drawing.terminal_text import label


def test_every_token_has_a_printable_label():
    for token in HOSTILE:
        shown = label(token)
        assert shown
        assert shown.isprintable()
    assert label(b" the\n") == "·the⏎"
    assert label(b"\xe6\x97") == "‹E6 97›"
    assert label("日本語".encode(), width=5) == "日本…"
    assert label("e\u0301".encode()) == "e\u0301"
    assert label("\u0301e".encode()) == "◌\u0301e"
