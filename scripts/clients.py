"""Run the programs of docs/clients.md against `tgen serve` and print what works.

A section has a `pip install` or `npm install` line, a block that all its programs start with, and
the programs, each below a comment that says what it does:

    <!-- client: chat -->
    <!-- client: tools; auto -->      the model decides whether it calls a tool
    <!-- client: json_mode; model -->  the client does not send the schema

An application without a program to install has comments instead, with the version whose requests
scripts/clients_replay.py sends:

    <!-- replay of 1.2.3: tools; auto -->

A program is ok if it ends with status 0 and the server refused none of its requests. With `auto`,
a model whose template has no tools must be refused (status 400), and the small model that is
trained here must call a tool. With `model`, a program that fails though every response had status
200 is the model's failure.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "clients.md"
REPLAY = ROOT / "scripts" / "clients_replay.py"
ADDRESS, NAME = "http://127.0.0.1:8000", "my-chat-model"
FOLDER = "SmolLM2-135M-Instruct"  # of the model on the page
CONTEXT = 4096  # of the small model, which was trained on shorter rows
OPTIONS = (
    *("--log", "json", "--grammar-timeout", "60", "--max-tokens", "256"),
    *("--dtype", "float32"),  # as the local model of lm-evaluation-harness
)
SECONDS = 300  # that a program may take
SUFFIXES = {"python": ".py", "js": ".mjs", "sh": ".sh"}
REPLAYS = r"<!-- replay of (\S+): (.*?)(?:; (\w+))? -->"


class Program(NamedTuple):
    """A program of the page."""

    client: str
    install: tuple[str, ...]  # "pip" or "npm", and packages; or "replay", and a version
    what: str
    depends: str  # "auto", "model" or ""
    language: str
    code: str


def read_page(text: str) -> list[Program]:
    """Return the programs of a page."""
    programs = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        client = section.partition("\n")[0]
        replays = re.findall(REPLAYS, section)
        for version, what, depends in replays:
            arguments = shlex.join([client, what, ADDRESS])
            code = f"{shlex.quote(sys.executable)} {shlex.quote(str(REPLAY))} {arguments}"
            programs.append(Program(client, ("replay", version), what, depends, "sh", code))
        if replays:
            continue
        install = re.search(r"^`(pip|npm) install (.*)`$", section, re.MULTILINE)
        if install is None:
            raise SystemExit(f"{PAGE.name}: {client} has no line that installs it")
        start = ""
        blocks = r"(?:<!-- client: (.*?)(?:; (\w+))? -->\n)?```(python|js|sh)\n(.*?)```\n"
        for what, depends, language, code in re.findall(blocks, section, re.DOTALL):
            if not what:
                start += code
                continue
            packages = (install[1], *install[2].split())
            programs.append(Program(client, packages, what, depends, language, start + code))
    return programs


def install(program: Program, cache: Path) -> str:
    """Install a program's client, unless it is there; return its version."""
    tool, *packages = program.install
    folder = cache / re.sub(r"\W+", "-", program.client).lower()
    stamp = folder / ".made"
    folder.mkdir(exist_ok=True)
    if tool == "replay":
        return packages[0]
    if tool == "npm":
        if not stamp.exists():
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            run_quietly("npm", "install", *packages, cwd=folder)
        file = folder / "node_modules" / packages[-1 if "openai" in packages[-1] else 0]
        version = json.loads((file / "package.json").read_bytes())["version"]
    else:
        python = folder / "bin" / "python"
        if not stamp.exists():
            run_quietly(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
            torch = re.search(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
            (folder / "constraints.txt").write_text(torch[0] if torch else "")
            pip = [make_pip(cache), "-m", "pip", "--python", python, "install"]
            options = ["--disable-pip-version-check", "--no-compile", "--constraint"]
            run_quietly(*pip, *options, folder / "constraints.txt", *packages)
        name = re.sub(r"\[.*", "", packages[0])
        code = f"from importlib.metadata import version; print(version({name!r}))"
        version = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    stamp.touch()
    return version


def make_pip(cache: Path) -> Path:
    """Return a Python with pip, which installs into the other environments. Installing pip into
    each of them would take seconds."""
    folder = cache / "pip"
    if not (folder / ".made").exists():
        run_quietly(sys.executable, "-m", "venv", "--clear", folder)
        (folder / ".made").touch()
    return folder / "bin" / "python"


def run_quietly(*command: object, cwd: Path | None = None) -> None:
    """Run a command; raise SystemExit with the end of its output if it fails."""
    result = subprocess.run(
        [*map(str, command)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{result.stdout[-2000:]}")


def train_model(cache: Path) -> Path:
    """Return the small model that calls tools; the first time, train it in a minute."""
    model = cache / "model"
    if not (model / ".made").exists():
        run_quietly(sys.executable, ROOT / "scripts" / "clients_model.py", cache)
        options = ["--template", cache / "template.jinja", "--size", "nano", "--steps", "300"]
        train = [sys.executable, "-m", "tgen", "train", cache / "rows.jsonl", *options]
        run_quietly(*train, "--out", model, "--overwrite", "--quiet")
        config = json.loads((model / "config.json").read_bytes())
        config["max_position_embeddings"] = CONTEXT
        (model / "config.json").write_text(json.dumps(config))
        (model / ".made").touch()
    return model


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """Serve a model on a free port, with an access log; yield the address."""
    command = [sys.executable, "-m", "tgen", "serve", "--model", f"{NAME}={model}", "--port", "0"]
    with (
        log.open("wb") as file,
        subprocess.Popen([*command, *OPTIONS], stderr=file) as process,
    ):
        try:
            while not (found := re.search(r'serving \S+ on ([^\s"]+)', log.read_text())):
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)


def has_tools(address: str) -> bool:
    """Return whether the model's template shows tools."""
    body = json.dumps({"model": NAME}).encode()
    request = Request(f"{address}/api/show", body, {"Content-Type": "application/json"})
    with urlopen(request) as response:
        return "tools" in json.load(response)["capabilities"]


def run(program: Program, cache: Path, model: Path, address: str) -> tuple[int, str]:
    """Return the exit status and the output of a program."""
    folder = cache / re.sub(r"\W+", "-", program.client).lower()
    file = folder / f"program{SUFFIXES[program.language]}"
    file.write_text(program.code.replace(ADDRESS, address).replace(FOLDER, str(model)))
    command = {"python": [str(folder / "bin" / "python")], "js": ["node"], "sh": ["bash", "-e"]}
    with tempfile.TemporaryDirectory() as home:
        paths = f"{folder / 'bin'}:{os.environ['PATH']}"
        # Clients find neither settings nor keys of the user's.
        environment = {"PATH": paths, "HOME": home, "LLM_USER_PATH": home, "LC_ALL": "C.UTF-8"}
        try:
            result = subprocess.run(
                [*command[program.language], str(file)],
                env=environment,
                cwd=folder if program.language == "js" else home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            return 124, f"{(error.stdout or b'').decode()}\nno end after {SECONDS} seconds"
    return result.returncode, result.stdout.decode(errors="replace")


def judge(
    program: Program, status: int, output: str, responses: list[int], *, tools: bool, trained: bool
) -> str:
    """Return "ok", possibly with a remark, or what is wrong."""
    refused = [code for code in responses if code >= 400]
    if program.depends == "auto" and not tools:
        return "ok: refused" if refused == [400] * len(refused) != [] else "not refused"
    if refused or not responses:
        return f"statuses {responses}"
    if status:
        return "ok, but the model failed" if program.depends == "model" else f"exit status {status}"
    if program.depends == "auto" and not re.search(r"\bcall\b", output):
        return "no call" if trained else "ok, but the model made no call"
    return "ok"


def main() -> None:
    """Print a table; exit with status 1 if a program is not ok."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", help="sections of the page; default: all")
    parser.add_argument("--model", type=Path, help="chat model; default: a small one, trained here")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--verbose", action="store_true", help="print what the programs print")
    options = parser.parse_args()
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    programs = [
        program
        for program in read_page(PAGE.read_text())
        if not options.clients or program.client in options.clients
    ]
    versions = {program.client: "" for program in programs}
    for program in programs:
        versions[program.client] = versions[program.client] or install(program, cache)
    model = options.model.resolve() if options.model else train_model(cache)
    log, wrong = cache / "server.log", 0
    print("| client | version | what | result |\n|---|---|---|---|")
    with serving(model, log) as address:
        tools = has_tools(address)
        for program in programs:
            before = log.stat().st_size
            status, output = run(program, cache, model, address)
            time.sleep(0.2)  # a thread of the server's writes the log
            lines = map(json.loads, log.read_bytes()[before:].splitlines())
            responses = [line["status"] for line in lines if "status" in line]
            result = judge(
                program, status, output, responses, tools=tools, trained=not options.model
            )
            wrong += not result.startswith("ok")
            row = (program.client, versions[program.client], program.what, result)
            print(f"| {' | '.join(row)} |", flush=True)
            if options.verbose or not result.startswith("ok"):
                sys.stderr.write(output[-3000:] + "\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
