"""How vocabularies write bytes: in GPT-2's characters, or as sentencepiece's byte tokens."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tgen.tokenizer.spec import TokenizerSpec


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # sentencepiece's, besides its characters
SPACE = "▁"  # sentencepiece's space
_BYTE_VALUES = codecs.charmap_build("".join(BYTE_CHARACTERS))


def decode_byte_level(token: str) -> bytes:
    """Return the bytes of a token written in GPT-2's byte characters."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_VALUES)[0]
    except UnicodeEncodeError:  # other characters: no text becomes this token
        return token.encode()


def decode_sentencepiece(token: str) -> bytes:
    """Return the bytes of a sentencepiece token that is not a byte token."""
    return token.replace(SPACE, " ").encode()


def decode_token(spec: "TokenizerSpec", token: str) -> bytes:
    """Return the bytes of a token that is neither an added token nor a byte."""
    if spec.byte_level:
        return decode_byte_level(token)
    return (
        token.replace(spec.word_end, " ").encode() if spec.word_end else decode_sentencepiece(token)
    )


def spell_special(spec: "TokenizerSpec") -> tuple[dict[int, bytes], list[int | None]]:
    """Return the bytes of added tokens and of bytes by id, and each byte's token; None if the
    vocabulary has none."""
    spelled: dict[int, bytes] = {}
    names = [] if spec.word_end else BYTE_CHARACTERS if spec.byte_level else BYTE_TOKENS
    byte_ids = [spec.vocab.get(name) for name in names] or [None] * 256
    for added in spec.added_tokens:  # matched verbatim, but in sentencepiece also merged
        decoded = added.content if spec.byte_level else added.content.replace(SPACE, " ")
        spelled[added.id] = b"" if added.special else decoded.encode()
    for byte, byte_id in enumerate(byte_ids):  # also those among the added tokens
        if byte_id is not None:
            spelled[byte_id] = bytes([byte])
    return spelled, byte_ids
