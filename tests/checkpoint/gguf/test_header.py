"""Lists of strings in GGUF headers: the same whether they are read at once or one by one."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgen.checkpoint.gguf import header
from tgen.checkpoint.gguf.quantized_matrix import BLOCKS
from tgen.errors import ModelError

# Strings whose bytes look like lengths, are not UTF-8, or do not fit into one byte's length.
PIECES = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=8).map(str.encode),
    st.sampled_from([b"", b"\0", bytes(7), bytes(8), b"\n" + bytes(7), b"\xf0\x9f", b"a" * 300]),
    st.sampled_from([b"b" * 255, b"\x80" * 128, b"\1" + bytes(7) + b"c", "Ġ".encode()]),
)


def list_of(strings):
    packed = b"".join(struct.pack("<Q", len(s)) + s for s in strings)
    return struct.pack("<IQ", 8, len(strings)) + packed


def file_with(tmp_path, content):
    name = b"tokenizer.ggml.tokens"
    start = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(name)) + name + struct.pack("<I", 9)
    path = tmp_path / "it.gguf"
    path.write_bytes(start + content)
    return path


@given(strings=st.lists(PIECES, min_size=header._MANY, max_size=header._MANY + 8))
def test_strings_read_at_once_are_those_read_one_by_one(strings, tmp_path_factory):
    path = file_with(tmp_path_factory.mktemp("header"), list_of(strings))
    fields = header.read_header(path).fields
    expected = [string.decode("utf-8", errors="replace") for string in strings]
    assert fields == {"tokenizer.ggml.tokens": expected}


def test_short_strings_are_read_at_once(tmp_path, monkeypatch):
    strings = [f"token {i} ▁é".encode() for i in range(100)]
    path = file_with(tmp_path, list_of(strings))
    taken = []
    take = header._HeaderReader.take
    one = header._HeaderReader
    monkeypatch.setattr(one, "take", lambda self, n: taken.append(n) or take(self, n))
    assert len(header.read_header(path).fields["tokenizer.ggml.tokens"]) == 100
    assert len(taken) < 20


@pytest.mark.parametrize("missing", [1, 5, 9, 200])
def test_list_that_ends_with_the_file_is_damaged(tmp_path, missing):
    path = file_with(tmp_path, list_of([b"token"] * 30)[:-missing])
    with pytest.raises(ModelError, match="inside its header"):
        header.read_header(path)


def test_known_block_sizes_are_those_of_the_package():
    gguf = pytest.importorskip("gguf", reason="NO GGUF: block sizes are not compared")
    for ggml_type, block in BLOCKS.items():
        theirs = gguf.GGMLQuantizationType(ggml_type)
        assert block[:3] == (theirs.name.lower(), *gguf.GGML_QUANT_SIZES[theirs])
