"""GGUF files: header, fields and tensors, also with quantized weights."""

import struct
from array import array
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.models import make_config, random_arrays, use_model
from fuzz.mutations import Mutator, corrupt, plain
from tgen.checkpoint.chat_template import read_chat_template
from tgen.checkpoint.gguf import header, tokenizer
from tgen.checkpoint.gguf.writer import write_gguf
from tgen.config import GgufType, RopeScaling
from tgen.errors import ModelError
from tgen.tokenizer import Tokenizer, train_bpe

_CODES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's, by GGUF type
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_TOKENIZER = train_bpe([b"the king the king's 12"], vocab_size=262)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SENTENCEPIECE = Tokenizer(
    tokenizer.to_json(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *_BYTES, *"▁theking", "th", "▁the"],
            "tokenizer.ggml.scores": [0.0] * 267 + [-1.0, -2.0],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 10],
        }
    )[0],
    end_ids=[2],
)
_SCALING = RopeScaling(factor=8.0, original_context_length=8)
_MODELS: list[tuple[str, GgufType, Tokenizer, dict[str, Any]]] = [
    ("llama", "f32", _TOKENIZER, {"rope_scaling": _SCALING, "d_model": 16}),
    ("qwen3", "bf16", _TOKENIZER, {"tied_embeddings": False}),
    ("gpt2", "f16", _TOKENIZER, {}),
    ("qwen2", "q8_0", _TOKENIZER, {"d_model": 32, "d_ff": 32}),
    ("llama", "q4_0", _SENTENCEPIECE, {"d_model": 32, "d_ff": 32}),
]


class Gguf:
    """GGUF files, taken apart into lists that are changed and written again."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.gguf"
        self._models: list[tuple[str, Mutator, bytes]] = []
        for family, stored, its_tokenizer, values in _MODELS:
            config = make_config(family, **{"vocab_size": its_tokenizer.vocab_size} | values)
            fields = tokenizer.to_fields(
                its_tokenizer,
                config.vocab_size,
                ends=[its_tokenizer.end_of_text or 0],
                bos=0,
                pad=1,
                chat_template="{{ messages }}",
            )
            path = folder / f"{family}-{stored}.gguf"
            write_gguf(path, config, random_arrays(config), stored=stored, tokenizer_fields=fields)
            document, data = _parse(path)
            self._models.append((f"{family}-{stored}", Mutator(document), data))

    def change(self, i: int, rng: Random) -> str:
        """Change a document, or the numbers of the file."""
        family, mutator, data = self._models[i % len(self._models)]
        document, what = mutator.change(i // len(self._models), rng)
        content, numbers = _build(plain(document), data)
        if rng.random() < 0.3:
            if rng.random() < 0.5:
                what = ""
                content, numbers = _build(mutator.document, data)
            content, also = corrupt(content, numbers, rng)
            what += f"; {also}"
        self._path.write_bytes(content)
        return f"{family}: {what}"

    def read(self) -> None:
        """Read the chat template, load the model and generate."""
        with suppress(ModelError):
            read_chat_template(self._path)
        use_model(self._path)


class SplitGguf:
    """A model in two GGUF files, one of which is changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        whole = folder / "whole.gguf"
        config = make_config("llama", vocab_size=_TOKENIZER.vocab_size)
        fields = tokenizer.to_fields(_TOKENIZER, config.vocab_size, ends=[0], bos=0, pad=1)
        write_gguf(whole, config, random_arrays(config), stored="f32", tokenizer_fields=fields)
        document, data = _parse(whole)
        whole.unlink()
        tensors = document["tensors"]
        half = len(tensors) // 2
        middle = tensors[half]["offset"]
        second = [tensor | {"offset": tensor["offset"] - middle} for tensor in tensors[half:]]
        self._parts: list[tuple[Path, Mutator, bytes]] = []
        for i, (own, more, its_data) in enumerate(
            ((tensors[:half], document["fields"], data[:middle]), (second, [], data[middle:]))
        ):
            split = {"split.no": i, "split.count": 2, "split.tensors.count": len(tensors)}
            part = document | {
                "fields": [*([name, 2, n] for name, n in split.items()), *more],
                "tensors": own,
            }
            path = folder / f"model-0000{i + 1}-of-00002.gguf"
            self._parts.append((path, Mutator(part), its_data))

    def change(self, i: int, rng: Random) -> str:
        """Restore both files, and change or remove one."""
        for path, mutator, data in self._parts:
            path.write_bytes(_build(mutator.document, data)[0])
        path, mutator, data = self._parts[i % 2]
        document, what = mutator.change(i // 2, rng)
        content, numbers = _build(plain(document), data)
        if rng.random() < 0.2:
            content, also = corrupt(content, numbers, rng)
            what += f"; {also}"
        path.write_bytes(content)
        if rng.random() < 0.02:
            path.unlink()
            what = "removed"
        self._path = rng.choice(self._parts)[0]
        return f"{path.name}: {what}"

    def read(self) -> None:
        """Load the model by one of its parts, and generate."""
        use_model(self._path)


def _parse(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a file's document and the bytes of its tensors."""
    fields, tensors = header.read_header(path)
    start = min(entry.start for entry in tensors.values())
    listed = [
        {
            "name": name,
            "shape": list(entry.shape[::-1]),
            "type": entry.ggml_type,
            "offset": entry.start - start,
        }
        for name, entry in tensors.items()
    ]
    document = {
        "magic": "GGUF",
        "version": 3,
        "fields": [[name, *_typed(value)] for name, value in fields.items()],
        "tensors": listed,
    }
    return document, path.read_bytes()[start:]


def _typed(value: Any) -> tuple[Any, Any]:
    """Return the GGUF type and the value; of a list: [9, type], and a list."""
    if isinstance(value, array):
        return [_ARRAY, next(t for t, code in _CODES.items() if code == value.typecode)], list(
            value
        )
    if isinstance(value, list):
        return [_ARRAY, _STRING], value
    if isinstance(value, str):
        return _STRING, value
    return (7 if isinstance(value, bool) else 6 if isinstance(value, float) else 4), value


class _Builder:
    """The bytes of a file, and where its numbers are; whatever the document has is written."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.numbers: list[tuple[int, int]] = []

    def number(self, code: str, value: Any) -> None:
        if code in "fd":
            try:
                self.content += struct.pack("<" + code, float(value))
            except (TypeError, ValueError, OverflowError):
                self.content += struct.pack("<" + code, float("inf"))
            return
        size = struct.calcsize("<" + code)
        self.numbers.append((len(self.content), size))
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            number = -1
        self.content += (number % (1 << 8 * size)).to_bytes(size, "little")

    def string(self, value: Any) -> None:
        text = value if isinstance(value, str) else str(value)[:4000]
        data = text.encode("utf-8", "surrogatepass")
        self.numbers.append((len(self.content), 8))
        self.content += len(data).to_bytes(8, "little") + data

    def value(self, kind: Any, value: Any) -> None:
        if isinstance(kind, list):
            items = value if isinstance(value, list) else [value]
            item = kind[-1] if kind and isinstance(kind[-1], int) else _STRING
            self.number("I", _ARRAY)
            self.number("I", item)
            self.number("Q", len(items))
            try:  # at once, if all are of this type
                self.content += struct.pack(f"<{len(items)}{_CODES[item]}", *items)
            except (KeyError, struct.error, OverflowError):
                for one in items:
                    self.plain_value(item, one)
            return
        if isinstance(value, list | dict) or not isinstance(kind, int):  # of the value's own type
            kind, value = _typed(list(value) if isinstance(value, dict) else value)
            if isinstance(kind, list):
                self.value(kind, value)
                return
        self.number("I", kind)
        self.plain_value(kind, value)

    def plain_value(self, kind: int, value: Any) -> None:
        if kind in _CODES:
            self.number(_CODES[kind], value)
        else:
            self.string(value)


def _build(document: Any, data: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    document = document if isinstance(document, dict) else {}
    fields, tensors = (_list(document.get(name)) for name in ("fields", "tensors"))
    builder = _Builder()
    builder.content += str(document.get("magic", "")).encode("utf-8", "replace")
    builder.number("I", document.get("version", 0))
    builder.number("Q", len(tensors))
    builder.number("Q", len(fields))
    for field in fields:
        name, kind, value = (*_list(field), None, None, None)[:3]
        builder.string(name)
        builder.value(kind, value)
    for tensor in tensors:
        tensor = tensor if isinstance(tensor, dict) else {}
        builder.string(tensor.get("name", ""))
        shape = _list(tensor.get("shape"))
        builder.number("I", len(shape))
        for n in shape:
            builder.number("Q", n)
        builder.number("I", tensor.get("type", 0))
        builder.number("Q", tensor.get("offset", 0))
    content = bytes(builder.content)
    return content.ljust(-(-len(content) // _ALIGNMENT) * _ALIGNMENT, b"\0") + data, builder.numbers


def _list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
