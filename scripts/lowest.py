"""Print the lowest allowed version of every direct dependency, as pip requirements.

    python scripts/lowest.py [NAME=VERSION]...

Lower bounds come from `pyproject.toml`, NAME=VERSION replaces one. Tools that only the tests use
have the versions of `constraints.txt`, or older ones where the lowest gguf asks for them.
transformers, and peft that requires it, are left out: transformers' requirements contradict the
lowest tokenizers, and `scripts/interop` tests it.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_NEEDED = {"transformers", "peft", "mypy", "ruff", "coverage"}
UNPINNED = {"sentencepiece"}


def main() -> None:
    """Print one requirement per line."""
    replaced = dict(argument.split("=", 1) for argument in sys.argv[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = dict(project["optional-dependencies"])
    tools = extras.pop("test")
    bounds = project["dependencies"] + [bound for extra in extras.values() for bound in extra]
    lowest = {}
    for bound in bounds:
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)(;.*)?", bound)
        if not match:
            raise SystemExit(f"{bound!r} is not of the form NAME>=VERSION")
        name, version, marker = match.groups()
        lowest[name] = f"{name}=={replaced.get(name, version)}{marker or ''}"
    pins = re.findall(r"^([\w.-]+)==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower(): version for name, version in pins}
    for tool in tools:
        name = re.split(r"[<>=]", tool)[0]
        if name not in lowest and name not in NOT_NEEDED:
            pin = "<=" if name in UNPINNED else "=="
            lowest[name] = f"{name}{pin}{pinned[name.lower()]}"
    sys.stdout.write("\n".join(lowest.values()) + "\n")


if __name__ == "__main__":
    main()
