"""Changes of JSON-like documents: values replaced, removed, repeated and moved, alone and in pairs.

A changed document may contain text that `json.dumps` cannot write, such as 1e999 or a key twice;
`dump` writes it.
"""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Path = tuple[Any, ...]  # keys and indices, from the outermost value to the innermost

ESCAPES = "\x1b]52;c;ZQ==\x1b\\\x1b[2J\x9b31m\a\b\r\u202e"  # clipboard, screen, color, direction
_RAW = {  # strings that `dump` replaces by text that is not a JSON string, or not JSON
    "@1e999@": b"1e999",
    "@digits@": b"9" * 5000,
    "@deep@": b"[" * 5000 + b"]" * 5000,
    "@deeper@": b'{"a":' * 100_000,
    "@bytes@": b'"\xff\xfe\xc3"',
    "@nothing@": b"",
    "@text@": b"}{",
}
_PLAIN = {"@1e999@": float("inf"), "@digits@": 10**4000}
_AGAIN = "@again@"  # prefix of a key that `dump` removes
EXTREMES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 255, 65_536, 1_000_000, 50_000_000),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**400, -(10**400), 0.0, -0.0, 0.5, 1.0, 5e-324, 1e-30, 1e30, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), *_RAW),
    *("", " ", "a", "0", "1", "-1", "false", "nan", "default", "\0", "\n", ESCAPES, "é日🦋"),
    *("\ud800",),
    *("/etc/passwd", "../../etc/passwd", "..", ".", "a/b", "model.safetensors", "x" * 300),
    *("x" * 200_000,),
    *([], {}, [[]], [None], [0], [""], {"": 0}, {"a": {}}, [ESCAPES], {ESCAPES: ESCAPES}),
    *([0] * 10_000, {str(i): i for i in range(3000)}),
]  # fmt: skip
_STEP = 7919  # a prime: cases near each other differ in place and change


class Mutator:
    """Changes of one document, numbered: even ones are single changes, in an order in which all
    appear; odd ones are two or three changes at random."""

    def __init__(self, document: Any) -> None:
        self.document, self._document = document, [document]
        self._sites = [path for path in _paths(self._document) if path]
        self._n_kinds = len(EXTREMES) + len(_CHANGES)

    def change(self, i: int, rng: Random) -> tuple[Any, str]:
        """Return change number `i` of the document, and what was changed."""
        if i % 2 == 0:
            kind, site = divmod(
                i // 2 * _STEP % (len(self._sites) * self._n_kinds), len(self._sites)
            )
            document, what = _change(self._document, self._sites[site], kind, rng)
            return (document or [None])[0], what
        document, changes = self._document, []
        for _ in range(rng.choice((2, 2, 3))):
            kind, path = rng.randrange(self._n_kinds), rng.choice(self._sites)
            if _exists(document, path):
                document, what = _change(document, path, kind, rng)
                changes.append(what)
        return (document or [None])[0], "; ".join(changes)


def dump(document: Any) -> bytes:
    """Return a document as JSON, or nearly so."""
    text = json.dumps(document).encode()
    if b'"@' in text:
        for name, raw in _RAW.items():
            text = text.replace(f'"{name}"'.encode(), raw)
        text = text.replace(f'"{_AGAIN}'.encode(), b'"')
    return text


def plain(document: Any) -> Any:
    """Return a document with the values that `dump` would write in place of strings, as far as
    Python has them."""
    if isinstance(document, str):
        return _PLAIN.get(document, document) if document.startswith("@") else document
    if isinstance(document, list):
        return [plain(value) for value in document]
    if isinstance(document, dict):
        return {plain(key): plain(value) for key, value in document.items()}
    return document


def corrupt(content: bytes, numbers: list[tuple[int, int]], rng: Random) -> tuple[bytes, str]:
    """Change a binary file: one of its little-endian numbers, (position, bytes), or its length."""
    if rng.random() < 0.2 or not numbers:
        n = rng.choice((0, 1, 7, 8, 9, len(content) - 1, len(content) + 1, len(content) + 4096))
        n = rng.choice((n, rng.randrange(len(content) + 1)))
        return content[:n].ljust(n, b"\0"), f"{n} of {len(content)} bytes"
    position, size = rng.choice(numbers)
    old = int.from_bytes(content[position : position + size], "little")
    near = [
        old + 1,
        old - 1,
        2 * old,
        old + 32,
        old + 256,
        old << 16,
        -old,
        old ^ (1 << (8 * size - 1)),
    ]
    new = rng.choice([*near, 0, 1, 2, 8, 9, 255, 2**16, 2**20, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    new %= 1 << (8 * size)
    changed = content[:position] + new.to_bytes(size, "little") + content[position + size :]
    return changed, f"byte {position}: {old} -> {new}"


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value inside; of long lists and objects, of 8 values."""
    yield path
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if len(keys) <= 24 else [*keys[:5], *keys[-3:]]:
            yield from _paths(value[key], (*path, key))


def _exists(document: Any, path: Path) -> bool:
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return False
        if isinstance(key, int) and isinstance(document, str):
            return False
    return True


def _change(document: Any, path: Path, kind: int, rng: Random) -> tuple[Any, str]:
    where = "/".join(map(str, path[1:]))[-80:]
    if kind < len(EXTREMES):
        value = EXTREMES[kind]
        return _edit(document, path, lambda inside, key: inside.__setitem__(key, value)), (
            f"{where} = {value!r}"[:160]
        )
    change = _CHANGES[kind - len(EXTREMES)]
    changed = _edit(document, path, lambda inside, key: change(inside, key, document, rng))
    return changed, f"{where}: {change.__name__.removeprefix('_')}"


def _edit(value: Any, path: Path, edit: Callable[[Any, Any], object]) -> Any:
    """Return the value with an edit at a path; what is not on the path is shared."""
    copy = value.copy()
    if len(path) == 1:
        edit(copy, path[0])
    else:
        copy[path[0]] = _edit(copy[path[0]], path[1:], edit)
    return copy


def _removed(inside: Any, key: Any, *_: Any) -> None:
    del inside[key]


def _repeated(inside: Any, key: Any, *_: Any) -> None:
    if isinstance(inside, dict):
        inside[f"{_AGAIN}{key}"] = inside[key]
    else:
        inside.insert(key, inside[key])


def _renamed(inside: Any, key: Any, _: Any, rng: Random) -> None:
    name = rng.choice(
        ["", "x", ESCAPES, "\ud800", "../x", "__class__", str(key) + " ", str(key).upper()]
    )
    value = inside.pop(key)
    if isinstance(inside, dict):
        inside[name] = value
    else:
        inside.insert(key, {name: value})


def _added(inside: Any, key: Any, _: Any, rng: Random) -> None:
    value = rng.choice(EXTREMES)
    if isinstance(inside, dict):
        inside[rng.choice(["", "type", "x", ESCAPES, f"{key}_"])] = value
    else:
        inside.insert(key, value)


def _reversed(inside: Any, *_: Any) -> None:
    if isinstance(inside, list):
        inside.reverse()
    else:
        items = list(inside.items())[::-1]
        inside.clear()
        inside.update(items)


def _swapped(inside: Any, key: Any, _: Any, rng: Random) -> None:
    other = rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    inside[key], inside[other] = inside[other], inside[key]


def _from_elsewhere(inside: Any, key: Any, document: Any, rng: Random) -> None:
    value = document
    for _ in range(rng.randrange(1, 5)):
        if not isinstance(value, dict | list) or not value:
            break
        value = rng.choice(list(value.values()) if isinstance(value, dict) else value)
    inside[key] = value


def _another_type(inside: Any, key: Any, _: Any, rng: Random) -> None:
    old = inside[key]
    if isinstance(old, dict):
        inside[key] = rng.choice(
            [list(old), list(old.values()), [list(item) for item in old.items()]]
        )
    elif isinstance(old, list):
        inside[key] = rng.choice(
            [dict(enumerate(old)), {str(i): v for i, v in enumerate(old)}, [old]]
        )
    else:
        inside[key] = rng.choice([[old], {"value": old}, str(old), repr(old)])


def _near(inside: Any, key: Any, _: Any, rng: Random) -> None:
    old = inside[key]
    if isinstance(old, bool) or old is None:
        inside[key] = not old
    elif isinstance(old, int):
        inside[key] = rng.choice([old + 1, old - 1, 2 * old, old // 2, -old, old << 20, str(old)])
    elif isinstance(old, float):
        inside[key] = rng.choice([-old, 2 * old, old / 2, old * 1e30, old * 1e-30, old + 0.5])
    elif isinstance(old, str):
        inside[key] = rng.choice(
            [old + "x", old[:-1], old.upper(), old * 2, old + ESCAPES, old[::-1]]
        )
    elif isinstance(old, list):
        inside[key] = rng.choice(
            [old[:-1], old[1:], old * 2, old[::-1], [*old, None], old[:1] * 1000]
        )
    else:
        inside[key] = dict(rng.sample(list(old.items()), len(old) // 2))


_CHANGES: list[Callable[..., None]] = [
    *(_removed, _repeated, _renamed, _added, _reversed, _swapped, _swapped, _from_elsewhere),
    *(_from_elsewhere, _from_elsewhere, _another_type, _another_type, _near, _near, _near, _near),
    *(_near,),
]  # fmt: skip
