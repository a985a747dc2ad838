"""Imports between packages, and who prints and touches the disk: `docs/architecture.md`."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tgen"
FILES = sorted(SOURCE.rglob("*.py"))

# package: what it may import of tgen besides itself, `errors`, `config` and `reports`
ALLOWED = {
    "version": "",
    "errors": "",
    "config": "",
    "reports": "",
    "distributed": "",
    "storage": "",
    "machine": "distributed storage",
    "tokenizer": "storage",
    "documents": "storage machine",
    "corpus": "distributed storage machine documents tokenizer",
    "model": "machine",
    "checkpoint": "storage machine tokenizer model",
    "planning": "model",
    "chat": "machine tokenizer checkpoint",
    "engine": "storage machine model checkpoint",
    "inspection": "machine tokenizer corpus model checkpoint",
    "lora": "storage machine tokenizer model checkpoint",
    "drawing": "inspection generation loaded_model",
    "generation": "machine engine",
    "training": "distributed machine corpus model planning lora",
    "loaded_model": "tokenizer checkpoint chat engine lora generation",
    "runs": "distributed storage machine tokenizer corpus model checkpoint planning chat "
    "engine lora generation training",
    "experiments": "storage planning runs scoring loaded_model corpus",
    "benchmark": "machine checkpoint planning engine lora generation training loaded_model",
    "llm_plugin": "checkpoint generation loaded_model",
    "scoring": "corpus chat loaded_model",
    "serve": "storage machine tokenizer corpus checkpoint chat engine inspection lora drawing "
    "generation loaded_model runs",
    "python_errors": "drawing runs",
    "python_api": "tokenizer checkpoint engine inspection lora drawing generation loaded_model "
    "runs scoring python_errors",
    "cli": "distributed storage machine tokenizer documents corpus model checkpoint chat engine "
    "inspection lora drawing generation loaded_model runs benchmark scoring experiments serve",
    "__init__": "python_api",
    "__main__": "cli",
}
SHARED = {"version", "errors", "config", "reports"}
# library: where alone it may be imported
LIBRARIES = {
    "torch": "machine/device machine/openmp_wait model lora/layers training inspection "
    "python_api distributed engine/torch_engine engine/cuda_graph engine/cuda_attention "
    "benchmark/training_step benchmark/roofline benchmark/other_engines serve/inspection_child",
    "typer": "cli",
    "rich": "cli drawing",
    "tokenizers": "tokenizer",
    "llvmlite": "engine",
    "safetensors": "checkpoint",
    "tensorboardX": "runs/tensorboard",
    "chardet": "corpus/encodings",
    "backports": "corpus/archives",
    "jinja2": "chat drawing/page",
    "PIL": "drawing",
    "gguf": "checkpoint/gguf",
    "pyarrow": "corpus/table_child",
    "transformers": "benchmark/other_engines python_api",
    "llama_cpp": "benchmark/other_engines",
    "llguidance": "generation",
    "llm": "llm_plugin",
    "pydantic": "llm_plugin serve",
    "pypdf": "documents/pdf",
    "striprtf": "documents/rtf",
    "starlette": "serve",
    "uvicorn": "serve",
}
WITHOUT_TORCH = "planning/"
UNSAFE = {"pickle", "marshal", "shelve", "dill"}  # loading them can run code


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix().removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


@each_file
def test_a_file_imports_only_what_its_package_may(path):
    name = name_of(path)
    package = name.split("/")[0]
    for imported in imports(path):
        library, *rest = imported.split(".")
        if library == "tgen":
            allowed = SHARED | {package} | set(ALLOWED[package].split())
            assert rest[0] in allowed, f"{package} may not import {imported}"
        places = LIBRARIES.get(library, package).split()
        assert any(f"{name}/".startswith(f"{place}/") for place in places), f"imports {imported}"
        assert library not in UNSAFE, f"imports {library}"
        assert library != "torch" or not name.startswith(WITHOUT_TORCH), "imports torch"


def test_the_table_is_complete_and_without_cycles():
    assert {name_of(path).split("/")[0] for path in FILES} == set(ALLOWED)
    done: set[str] = set()
    while missing := set(ALLOWED) - done:
        ready = {name for name in missing if set(ALLOWED[name].split()) <= done}
        assert ready, f"a cycle among {missing}"
        done |= ready


@each_file
def test_only_cli_prints_and_only_storage_touches_the_disk(path):
    calls = {
        node.func.id
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "eval", "exec"}
    if not name_of(path).startswith("storage/"):
        assert "open" not in calls
        assert not re.search(r"\.(write|read)_(bytes|text)\(", path.read_text())


def test_the_public_names_exist():
    import tgen

    assert tgen.__all__ == sorted(tgen.__all__)
    for name in tgen.__all__:
        assert getattr(tgen, name) is not None
    with pytest.raises(AttributeError):
        _ = tgen.nothing
