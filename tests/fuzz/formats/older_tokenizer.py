"""tokenizer.model of sentencepiece, and vocab.json with merges.txt."""

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from fuzz.models import save_model, use_model
from fuzz.mutations import Mutator, corrupt, dump, plain
from tgen.tokenizer import train_bpe

_TEXT = b"the king's 12345 \xe6\x97\xa5 \xff\n\n <|im_end|></s>"
_PIECES = [["<unk>", 0.0, 2], ["<s>", 0.0, 3], ["</s>", 0.0, 3], ["<pad>", 0.0, 4]]
_PIECES += [[f"<0x{byte:02X}>", 0.0, 6] for byte in range(256)]
_PIECES += [["▁t", -0.0, 1], ["he", -1.0, 1], ["▁the", -2.0, 1], ["ki", -3.0, 1]]
_PIECES += [[character, -4.0 - i, 1] for i, character in enumerate("▁thekings日")]
_TRAINER = [[3, 2], [40, 0], [41, 1], [42, 2], [24, 0]]  # fields of sentencepiece_model.proto
_NORMALIZER = [[1, "identity"], [2, ""], [3, 1], [4, 0]]
_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_prefix_space": False,
    "add_bos_token": True,
    "bos_token": {"content": "<|endoftext|>", "lstrip": False},
    "eos_token": "</s>",
    "additional_special_tokens": ["<|im_end|>"],
    "added_tokens_decoder": {"3": {"content": "<pad>", "special": True, "lstrip": True}},
    "legacy": False,
}


class OlderTokenizer:
    """Model directories without tokenizer.json."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        byte_level = train_bpe([b"the king the king's 12"], vocab_size=262)
        model = json.loads(byte_level.json)["model"]
        vocab = {"vocab": model["vocab"], "merges": model["merges"][:20]}
        pieces = {"pieces": _PIECES, "trainer": _TRAINER, "normalizer": _NORMALIZER}
        more = {"config": _CONFIG, "added": {"<|im_end|>": len(_PIECES)}}
        self._models: list[tuple[Path, Mutator]] = []
        for name, document in (("pieces", pieces), ("vocab", vocab)):
            save_model(folder / name, "llama", tokenizer=byte_level, vocab_size=len(_PIECES) + 1)
            (folder / name / "tokenizer.json").unlink()
            self._models.append((folder / name, Mutator(document | more)))

    def change(self, i: int, rng: Random) -> str:
        """Change the files of one model."""
        self._path, mutator = self._models[i % 2]
        document, what = mutator.change(i // 2, rng)
        document = document if isinstance(document, dict) else {}
        for name, key in (("tokenizer_config.json", "config"), ("added_tokens.json", "added")):
            (self._path / name).write_bytes(dump(document.get(key)))
        if self._path.name == "vocab":
            (self._path / "vocab.json").write_bytes(dump(document.get("vocab")))
            lines = [" ".join(map(str, _list(pair))) for pair in _list(document.get("merges"))]
            merges = "\n".join(["#version: 0.2", *lines])
            (self._path / "merges.txt").write_bytes(merges.encode("utf-8", "surrogatepass"))
            return f"vocab: {what}"
        content = _build(plain(document))
        if rng.random() < 0.3:
            numbers = [(at, rng.choice((1, 2, 4))) for at in range(len(content))]
            content, also = corrupt(content, numbers, rng)
            what += f"; {also}"
        (self._path / "tokenizer.model").write_bytes(content)
        return f"pieces: {what}"

    def read(self) -> None:
        """Load the model, generate, encode and decode."""
        tokenizer = use_model(self._path).tokenizer
        tokenizer.encode_with_special(_TEXT.decode("utf-8", "surrogateescape"))
        _ = tokenizer.merge_pairs
        tokenizer.decode(tokenizer.encode_prompt(_TEXT))


def _build(document: dict[Any, Any]) -> bytes:
    """Return a message of Protocol Buffers; whatever the document has is written."""
    pieces = [
        _field(1, b"".join(_field(n, value) for n, value in enumerate(_list(piece), 1)))
        for piece in _list(document.get("pieces"))
    ]
    trainer, normalizer = (
        b"".join(_field(*(*_list(pair), None, None)[:2]) for pair in _list(document.get(name)))
        for name in ("trainer", "normalizer")
    )
    return b"".join([*pieces, _field(2, trainer), _field(3, normalizer)])


def _field(number: Any, value: Any) -> bytes:
    number = number if type(number) is int else 9
    if isinstance(value, float):
        try:
            return _varint(number << 3 | 5) + struct.pack("<f", value)
        except OverflowError:
            value = str(value)
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return b"".join(_field(number, one) for one in _list(value))


def _varint(value: int) -> bytes:
    value %= 1 << 70  # more than a field may have
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
