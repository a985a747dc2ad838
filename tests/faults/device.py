"""What a device may hold after the power failed: recorded operations, and the states they allow.

What was written to a file since it was last synced may be there, be missing, end early, or be
zeros. Of what was done to the entries of a folder since it was synced any part may be missing; an
entry is changed at once, and a rename is one change. (The weakest order that file systems keep:
Pillai and others, "All File Systems Are Not Created Equal", OSDI 2014.)
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Node = int  # a file (above 0) or a folder, whatever it is called
ROOT: Node = 0


@dataclass(frozen=True)
class Operation:
    """A file's data at an offset, its size (truncate), changes of a folder, a sync, or a word."""

    kind: str  # write, truncate, entries, sync, said
    node: Node = ROOT
    offset: int = 0
    data: bytes = b""
    entries: tuple[tuple[str, Node | None], ...] = ()  # name -> what it is from now on
    site: str = ""  # of a sync: which one in the source
    said: Any = None


class Recorder:
    """Takes down what a program does to a folder, for `calls.watched`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.folders: dict[Node, dict[str, Node]] = {ROOT: {}}
        self.sizes: dict[Node, int] = {}

    def say(self, what: Any) -> None:
        """What the program told its user at this point."""
        self.operations.append(Operation("said", said=what))

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        before = arguments[0] if name in ("write", "fsync", "ftruncate") else None
        result = real(*arguments, **named)
        if name in ("write", "ftruncate", "fsync"):
            node = self._node(os.readlink(f"/proc/self/fd/{before}"))
            if name == "write":
                data = bytes(arguments[1][:result])
                self._add("write", node, offset=self.sizes[node], data=data)
                self.sizes[node] += result
            elif name == "ftruncate":
                self._add("truncate", node, offset=arguments[1])
                self.sizes[node] = arguments[1]
            else:
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
    """What is surely there, and what may be."""

    data: dict[Node, bytes] = field(default_factory=dict)
    entries: dict[Node, dict[str, Node]] = field(default_factory=dict)
    unsynced: dict[Node, list[Operation]] = field(default_factory=dict)
    said: Any = None

    def do(self, operation: Operation) -> None:
        """The program goes on by one operation."""
        if operation.kind == "said":
            self.said = operation.said
        elif operation.kind == "sync":
            self._settle(operation.node, self.unsynced.pop(operation.node, []))
        else:
            self.unsynced.setdefault(operation.node, []).append(operation)

    def _settle(self, node: Node, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.kind == "entries":
                _apply(self.entries.setdefault(node, {}), operation.entries)
            else:
                self.data[node] = _written(self.data.get(node, b""), operation)

    def copy(self) -> "Device":
        """As it is now."""
        unsynced = {node: list(operations) for node, operations in self.unsynced.items()}
        entries = {node: dict(entries) for node, entries in self.entries.items()}
        return Device(dict(self.data), entries, unsynced, self.said)

    def after_power_loss(self, draws: random.Random) -> "Device":
        """One of the states that may be found; `draws` decides what was lost."""
        found = self.copy()
        for node, operations in self.unsynced.items():
            way = draws.choice(("all", "nothing", "some", "some"))
            for operation in operations:
                if way == "all" or (way == "some" and draws.random() < 0.5):
                    found._settle(node, [operation])
                elif way == "some" and operation.kind == "write":
                    found._settle(node, [_damaged(operation, draws)])
        return found

    def tree(self, node: Node = ROOT, path: str = "") -> Iterator[tuple[str, bytes | None]]:
        """All paths with their contents; None: a folder."""
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


def _damaged(operation: Operation, draws: random.Random) -> Operation:
    """Ends early, or is zeros from somewhere on, or nothing of it is there."""
    n = len(operation.data)
    kept = draws.choice((0, draws.randrange(n + 1), 512 * draws.randrange(n // 512 + 1)))
    zeros = draws.choice((0, n - kept))
    return Operation(
        "write", operation.node, operation.offset, operation.data[:kept] + bytes(zeros)
    )


def _site() -> str:
    """The functions and lines of files.py that a sync comes from."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        if frame.f_code.co_filename.endswith("tgen/storage/files.py"):
            found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
