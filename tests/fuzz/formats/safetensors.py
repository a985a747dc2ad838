"""model.safetensors, shards and their index."""

import json
from pathlib import Path
from random import Random

from fuzz.models import save_model, use_model
from fuzz.mutations import Mutator, corrupt, dump
from tgen.checkpoint import model_dir
from tgen.checkpoint.export import export_transformers

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFile:
    """A safetensors file, split into header and data, that is changed and written again."""

    def __init__(self, path: Path) -> None:
        self.path, self.whole = path, path.read_bytes()
        n = int.from_bytes(self.whole[:8], "little")
        self._data = self.whole[8 + n :]
        self._mutator = Mutator(json.loads(self.whole[8 : 8 + n]))

    def change(self, i: int, rng: Random) -> str:
        """Change the header; sometimes its length, or the length of the data."""
        document, what = self._mutator.change(i, rng)
        content, noise = join(dump(document), self._data), rng.random()
        if noise < 0.1:
            content, also = corrupt(content, [(0, 8)], rng)
            what += f"; {also}"
        elif noise < 0.3:  # a header that promises other data: files with it
            n = max((tensor_end(tensor) for tensor in _values(document)), default=0)
            content = join(dump(document), self._data[:n].ljust(min(n, 1 << 20), b"\0"))
            what += f"; {n} bytes of data"
        self.path.write_bytes(content)
        return f"{self.path.name}: {what}"


def join(header: bytes, data: bytes) -> bytes:
    """Return a file with this header."""
    return len(header).to_bytes(8, "little") + header + data


def tensor_end(tensor: object) -> int:
    """Return where a tensor says that it ends, or 0."""
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    end = offsets[-1] if isinstance(offsets, list) and offsets else 0
    return end if type(end) is int and 0 <= end < 1 << 40 else 0


def _values(document: object) -> list[object]:
    return list(document.values()) if isinstance(document, dict) else []


class Safetensors:
    """Model directories with one file or several."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._files: list[tuple[Path, SafetensorsFile]] = []
        for family in ("llama", "gpt2", "classic"):
            save_model(folder / family, family, tied_embeddings=True)
            self._files.append((folder / family, SafetensorsFile(folder / family / _WEIGHTS)))
        save_model(folder / "half", "qwen3", tied_embeddings=False)
        self._shards = folder / "shards"
        export_transformers(
            model_dir.load(folder / "half"),
            self._shards,
            stored="bf16",
            max_shard_bytes=1500,
            progress=lambda _: None,
        )
        self._index = Mutator(json.loads((self._shards / _INDEX).read_bytes()))
        shards = [SafetensorsFile(path) for path in sorted(self._shards.glob("*.safetensors"))]
        assert len(shards) > 1
        self._files += [(self._shards, shard) for shard in shards[:2]]
        self._old: tuple[Path, bytes] | None = None

    def change(self, i: int, rng: Random) -> str:
        """Restore the file of the case before, and change one."""
        if self._old:
            self._old[0].write_bytes(self._old[1])
        kind, i = i % (len(self._files) + 2), i // (len(self._files) + 2)
        if kind < len(self._files):
            self._path, file = self._files[kind]
            self._old = file.path, file.whole
            return file.change(i, rng)
        self._path, path = self._shards, self._shards / _INDEX
        self._old = path, path.read_bytes()
        document, what = self._index.change(i * 2 + kind - len(self._files), rng)
        path.write_bytes(dump(document))
        return f"{_INDEX}: {what}"

    def read(self) -> None:
        """Load the model and generate."""
        use_model(self._path)
