"""How vocabularies write bytes: in GPT-2's characters, or as sentencepiece's byte tokens."""


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
