"""A model of a disk after a power loss: recorded operations, and the states they allow.

Data written to a file since its last sync may be present, missing, cut short, or zeros. Any subset
of the changes to a folder since its last sync may be missing; each change is atomic, and a rename
is one change. This is the weakest ordering of real file systems (Pillai et al., "All File Systems
Are Not Created Equal", OSDI 2014). A rank's sync of a file flushes only what that rank has written,
since the others may be on other machines.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import current_rank

Node = int  # a file (above 0) or a folder (below)
ROOT: Node = 0


@dataclass(frozen=True)
class Operation:
    """Data written to a file, its new size, changes of a folder, a sync, or a promise."""

    kind: str  # write, truncate, entries, sync, promise
    node: Node = ROOT
    offset: int = 0
    data: bytes = b""
    entries: tuple[tuple[str, Node | None], ...] = ()  # name -> new node; None: removed
    site: str = ""  # source lines of a sync
    promise: Any = None


class Recorder:
    """Hook for `calls.intercept_calls` that records all changes to a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.folders: dict[Node, dict[str, Node]] = {ROOT: {}}
        self.sizes: dict[Node, int] = {}
        self._writer: dict[Node, int] = {}  # rank

    def record_promise(self, promise: Any) -> None:
        """Record a report to the user at this point."""
        self.operations.append(Operation("promise", promise=promise))

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        fd = arguments[0] if name in ("write", "fsync", "ftruncate") else None
        result = real(*arguments, **named)
        if name in ("write", "ftruncate", "fsync"):
            node = self._node(os.readlink(f"/proc/self/fd/{fd}"))
            if name == "write":
                data = bytes(arguments[1][:result])
                self._add("write", node, offset=self.sizes[node], data=data)
                self.sizes[node] += result
                self._writer[node] = current_rank()
            elif name == "ftruncate":
                self._add("truncate", node, offset=arguments[1])
                self.sizes[node] = arguments[1]
            elif self._writer.get(node, current_rank()) == current_rank():
                self._add("sync", node, site=_site())
            return result
        paths = [self._path(path, named) for path in arguments[: 2 if "re" in name[:2] else 1]]
        folder, entry = self._node(paths[0].parent), paths[0].name
        entries = self.folders[folder]
        if name in ("rename", "replace"):
            assert paths[1].parent == paths[0].parent
            self._change(folder, {paths[1].name: entries[entry], entry: None})
        elif name in ("unlink", "rmdir"):
            self._change(folder, {entry: None})
        elif entry not in entries:
            if name == "mkdir":
                node = min(self.folders) - 1
                self.folders[node] = {}
            else:
                node = max(self.sizes, default=0) + 1
                self.sizes[node] = 0
            self._change(folder, {entry: node})
        return result

    def _add(self, kind: str, node: Node, **values: Any) -> None:
        self.operations.append(Operation(kind, node, **values))

    def _change(self, folder: Node, changes: dict[str, Node | None]) -> None:
        self._add("entries", folder, entries=tuple(changes.items()))
        _apply(self.folders[folder], changes.items())

    def _path(self, path: Any, named: dict[str, Any]) -> Path:
        if (fd := named.get("dir_fd")) is not None:
            path = Path(os.readlink(f"/proc/self/fd/{fd}")) / os.fsdecode(path)
        return Path(path)

    def _node(self, path: str | Path) -> Node:
        node = ROOT
        for part in Path(path).relative_to(self.root).parts:
            node = self.folders[node][part]
        return node


@dataclass
class Device:
    """Content that is certain, and operations that may be lost."""

    data: dict[Node, bytes] = field(default_factory=dict)
    entries: dict[Node, dict[str, Node]] = field(default_factory=dict)
    unsynced: dict[Node, list[Operation]] = field(default_factory=dict)
    promise: Any = None

    def do(self, operation: Operation) -> None:
        """Apply the next operation."""
        if operation.kind == "promise":
            self.promise = operation.promise
        elif operation.kind == "sync":
            self._apply_all(operation.node, self.unsynced.pop(operation.node, []))
        else:
            self.unsynced.setdefault(operation.node, []).append(operation)

    def _apply_all(self, node: Node, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.kind == "entries":
                _apply(self.entries.setdefault(node, {}), operation.entries)
            else:
                self.data[node] = _written(self.data.get(node, b""), operation)

    def copy(self) -> "Device":
        """Return a copy."""
        unsynced = {node: list(operations) for node, operations in self.unsynced.items()}
        entries = {node: dict(entries) for node, entries in self.entries.items()}
        return Device(dict(self.data), entries, unsynced, self.promise)

    def after_power_loss(self, rng: random.Random) -> "Device":
        """Return one possible state after a power loss, chosen by `rng`."""
        device = self.copy()
        for node, operations in self.unsynced.items():
            way = rng.choice(("all", "nothing", "some", "some"))
            for operation in operations:
                if way == "all" or (way == "some" and rng.random() < 0.5):
                    device._apply_all(node, [operation])
                elif way == "some" and operation.kind == "write":
                    device._apply_all(node, [_damaged(operation, rng)])
        return device

    def tree(self, node: Node = ROOT, path: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Yield all paths with their contents; None: a folder."""
        for name, child in self.entries.get(node, {}).items():
            if child > 0:
                yield f"{path}{name}", self.data.get(child, b"")
            else:
                yield f"{path}{name}", None
                yield from self.tree(child, f"{path}{name}/")


def _apply(entries: dict[str, Node], changes: Any) -> None:
    for name, node in changes:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _written(data: bytes, operation: Operation) -> bytes:
    if operation.kind == "truncate":
        return data[: operation.offset]
    start = data[: operation.offset].ljust(operation.offset, b"\0")
    return start + operation.data + data[operation.offset + len(operation.data) :]


def _damaged(operation: Operation, rng: random.Random) -> Operation:
    """Return a write that is cut short or zero from some byte on."""
    n = len(operation.data)
    n_kept = rng.choice((0, rng.randrange(n + 1), 512 * rng.randrange(n // 512 + 1)))
    zeros = rng.choice((0, n - n_kept))
    return Operation(
        "write", operation.node, operation.offset, operation.data[:n_kept] + bytes(zeros)
    )


def _site() -> str:
    """Return the functions and lines of files.py that made a sync."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        if frame.f_code.co_filename.endswith("tgen/storage/files.py"):
            found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
