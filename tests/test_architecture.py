"""The house's rules: who may import what, how long a file may be, who may print."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tgen"
FILES = sorted(SOURCE.rglob("*.py"))

# A room: what it may import of tgen, itself aside. `errors`, `config`, `reports` are open to all.
ROOMS = {
    "errors": set(),
    "config": set(),
    "reports": set(),
    "files": set(),
    "locks": {"files"},
    "tokenizer": {"files"},
    "fingerprints": set(),
    "stored": {"files"},
    "corpus": {"files", "tokenizer", "fingerprints", "stored"},
    "checkpoint": {"files", "tokenizer", "stored"},
    "model": set(),
    "engine": {"model", "checkpoint", "files"},
    "generation": {"engine"},
    "training": {"model", "fingerprints"},
    "introspect": {"model", "tokenizer", "checkpoint"},
    "benchmark": {
        "engine",
        "generation",
        "checkpoint",
        "tokenizer",
        "files",
        "training",
        "model",
        "corpus",
    },
    "runs": {
        "locks",
        "training",
        "corpus",
        "checkpoint",
        "files",
        "stored",
        "tokenizer",
        "model",
        "engine",
        "generation",
        "",  # the version alone
    },
    "chat": {"checkpoint", "files", "tokenizer"},
    "conversions": {"checkpoint"},
    "api": {"chat", "checkpoint", "conversions", "engine", "generation", "tokenizer", ""},
    "cli": {
        "api",
        "chat",
        "runs",
        "checkpoint",
        "files",
        "introspect",
        "benchmark",
        "engine",
        "generation",
        "model",
        "tokenizer",
        "",
    },
    "__init__": {"api"},
    "__main__": {"cli"},
}
OPEN = {"errors", "config", "reports"}
TORCH = {"model", "training", "introspect", "conversions"}
TORCH_ENGINE = {"torch_engine.py", "captured_step.py"}
# Learning and transformers are torch's, and so are the yardsticks.
TORCH_BENCHMARK = {"training_step.py", "limits.py", "transformers_arm.py"}
# Of training, and without torch.
PLANNING = {
    "plan.py",
    "shape.py",
    "pace.py",
    "memory.py",
    "reasons.py",
    "overrides.py",
    "weights.py",
    "rank_memory.py",
    "scaling.py",
}
ONLY_IN = {
    "typer": {"cli"},
    "rich": {"cli"},
    "tokenizers": {"tokenizer"},
    "numba": {"engine"},
    "llvmlite": {"engine"},
    "safetensors": {"checkpoint"},
    "tensorboardX": {"training"},
    "jinja2": {"chat", "cli"},
    "PIL": {"cli"},
    "gguf": {"checkpoint"},
    "transformers": {"benchmark", "conversions"},
    "llama_cpp": {"benchmark"},
}


def room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_what_its_room_may(path):
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "tgen":
            there = parts[1] if len(parts) > 1 else ""
            there = "" if there == "__version__" else there
            allowed = there in OPEN or there == here or there in ROOMS[here]
            assert allowed, f"{path}: {here} may not import {there}"
        if parts[0] == "torch":
            is_torch_room = here in TORCH and path.name not in PLANNING
            alone = path.name in TORCH_ENGINE | TORCH_BENCHMARK
            assert is_torch_room or alone, f"{path} imports torch"
        assert here in ONLY_IN.get(parts[0], {here}), f"{path} imports {name}"
        assert parts[0] not in ("pickle", "marshal", "shelve", "dill"), f"{path}: code from data"
    if path.name == "loop.py" and here == "training":
        assert not any("checkpoint" in name for name in imports(path))


def test_the_table_is_complete_and_has_no_circle():
    assert {room(path) for path in FILES} == set(ROOMS)
    done: set[str] = set()
    while len(done) < len(ROOMS):
        ready = {r for r, needs in ROOMS.items() if r not in done and needs - {""} <= done}
        assert ready, f"a circle among {set(ROOMS) - done}"
        done |= ready


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_one_idea(path):
    assert len(path.read_text().splitlines()) <= 300
    assert path.stem not in ("utils", "common", "helpers", "misc")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_one_room_prints_and_only_one_touches_the_disk(path):
    text = path.read_text()
    assert path.name == "files.py" or not re.search(r"\.(write|read)_(bytes|text)\(", text)
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "eval", "exec"}
    assert "open" not in calls or path.name in ("files.py", "locks.py")


def test_the_public_names_are_there():
    import tgen

    assert tgen.__all__ == sorted(tgen.__all__)
    for name in tgen.__all__:
        assert getattr(tgen, name) is not None
    with pytest.raises(AttributeError):
        _ = tgen.nothing
