"""pytorch_model.bin: ZIP archives and the older form of torch.save, built without torch."""

import io
import math
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fuzz.models import save_model, use_model
from fuzz.mutations import Mutator, corrupt, plain

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_TENSOR = ("storage", "class", "key", "device", "values", "offset", "shape", "strides")
_HEAD, _TAIL = 1 << 13, 1 << 11  # bytes of a file that are changed


class TorchFile:
    """Model directories whose pickle is a document that is changed and written again."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._models: list[tuple[Path, Mutator, list[bytes]]] = []
        for family in ("llama", "gpt2"):
            save_model(folder / family, family, tied_embeddings=True)
            weights = folder / family / "model.safetensors"
            arrays = load_file(weights)
            weights.unlink()
            tensors = {
                name: _tensor(str(i), array) for i, (name, array) in enumerate(arrays.items())
            }
            for root in ("archive", ""):  # "": the older form
                document = {"root": root, "byteorder": "little", "content": tensors}
                data = [array.tobytes() for array in arrays.values()]
                self._models.append((folder / family, Mutator(document), data))

    def change(self, i: int, rng: Random) -> str:
        """Change the document, or the numbers of the file."""
        self._path, mutator, data = self._models[i % len(self._models)]
        document, what = mutator.change(i // len(self._models), rng)
        is_zip = mutator.document["root"] == "archive"
        build = _build_zip if is_zip else _build_legacy
        if (noise := rng.random()) < 0.15:
            document, what = mutator.document, ""
        content = build(plain(document), data)
        if noise < 0.3:
            ends = [*range(_HEAD), *range(max(_HEAD, len(content) - _TAIL), len(content) - 8)]
            numbers = [(at, rng.choice((1, 2, 4, 8))) for at in ends if at < len(content) - 8]
            content, also = corrupt(content, numbers, rng)
            what += f"; {also}"
        (self._path / "pytorch_model.bin").write_bytes(content)
        return f"{self._path.name}, {'zip' if is_zip else 'legacy'}: {what}"

    def read(self) -> None:
        """Load the model and generate."""
        use_model(self._path)


def _tensor(key: str, array: np.ndarray) -> dict[str, Any]:
    """Return a tensor as a value of the document, with the name of what torch builds it by."""
    shape = list(array.shape)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    values = ("storage", "torch FloatStorage", key, "cpu", array.size, 0, shape, strides)
    return {"function": "torch._utils _rebuild_tensor_v2"} | dict(zip(_TENSOR, values, strict=True))


def _build_zip(document: Any, data: list[bytes]) -> bytes:
    document = document if isinstance(document, dict) else {"content": document}
    root = str(document.get("root"))[:300].encode("utf-8", "replace").decode()
    root = root.lstrip("\0")  # zipfile cuts names at a NUL, and rejects empty ones
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{root}/data.pkl", _pickle(document.get("content")))
        order = str(document.get("byteorder"))[:300]
        archive.writestr(f"{root}/byteorder", order.encode("utf-8", "replace"))
        for i, block in enumerate(data):
            archive.writestr(f"{root}/data/{i}", block)
    return buffer.getvalue()


def _build_legacy(document: Any, data: list[bytes]) -> bytes:
    document = document if isinstance(document, dict) else {"content": document}
    system = {"protocol_version": _PROTOCOL, "little_endian": document.get("byteorder") == "little"}
    keys = [str(i) for i in range(len(data))]
    parts = [_MAGIC, _PROTOCOL, system, document.get("content"), keys]
    sizes = [struct.pack("<Q", len(block) // 4) for block in data]
    blocks = [size + block for size, block in zip(sizes, data, strict=True)]
    return b"".join([*map(_pickle, parts), *blocks])


def _pickle(value: Any) -> bytes:
    return b"\x80\x02" + _dump(value) + b"."


def _dump(value: Any) -> bytes:
    """Return the instructions of a pickle that push a value; whatever the document has is
    written."""
    match value:
        case {"function": function, **values}:
            place = [values.get(name) for name in _TENSOR[:5]]
            kind, class_name, *more = place
            place_code = _dump(kind) + _global(class_name) + b"".join(map(_dump, more))
            rest = [values.get(name) for name in _TENSOR[5:]]
            rest_code = b"".join(
                _dump(tuple(one) if isinstance(one, list) else one) for one in rest
            )
            hooks = _global("collections OrderedDict") + b")R"
            return (
                _global(function) + b"((" + place_code + b"tQ" + rest_code + b"\x89" + hooks + b"tR"
            )
        case dict():
            items = b"".join(_dump(key) + _dump(one) for key, one in value.items())
            return b"}(" + items + b"u"
        case list():
            return b"](" + b"".join(map(_dump, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(_dump, value)) + b"t"
        case str():
            data = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(data)) + data
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8b" + struct.pack("<i", len(data)) + data
        case float():
            return b"G" + struct.pack(">d", value)
    return b"N"


def _global(name: Any) -> bytes:
    return b"c" + str(name)[:4000].replace(" ", "\n", 1).encode("utf-8", "replace") + b"\n"
