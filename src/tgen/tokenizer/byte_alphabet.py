"""How a vocabulary spells bytes: both kinds of tokenizer have a token for each of the 256."""

import codecs


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {byte: chr(byte) for byte in visible}
    table |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # sentencepiece's, beside its characters
SPACE = "▁"  # sentencepiece's space
_BYTE_OF = codecs.charmap_build("".join(BYTE_CHARACTERS))


def byte_level(token: str) -> bytes:
    """The bytes of a token that is written in stand-ins."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_OF)[0]
    except UnicodeEncodeError:  # no stand-ins: no text becomes this token
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """The bytes of a token that is written in characters; byte tokens are not."""
    return token.replace(SPACE, " ").encode()
