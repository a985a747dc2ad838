"""The options of `tgen serve`: wrong ones end it before a model is loaded."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.adapters import save_adapter
from support.command import clean_environment
from tgen.cli.app import run
from tgen.cli.model_loading import short_name
from tgen.cli.serve import KEY_VARIABLE, ServeOptions, find_sources
from tgen.config import EngineOptions
from tgen.errors import UsageError
from tgen.loaded_model import LoadedModel
from tgen.machine import device, memory


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--port", 70_000], 2, b"--port: invalid value 70000"),
        (["--queue", 0], 2, b"--queue: invalid value 0"),
        (["--max-body", "much"], 2, b"--max-body: not a size"),
        (["--max-body", 500], 2, b"--max-body: the unit is missing"),
        (["--request-timeout", "nan"], 2, b"--request-timeout: invalid value nan"),
        (["--api-key", " "], 2, b"--api-key: the key is empty"),
        (["--api-key", "a\nb"], 2, b"--api-key: the key has characters that are not"),
        (["--api-key", "a\udcffb"], 2, b"--api-key: the key has characters that are not"),
        (["--cors", "*"], 2, b"--cors '*' without a key"),
        (["--cors", "https://a.example/"], 2, b"--cors: invalid value 'https://a.example/'"),
        (["--cors", "a.example"], 2, b"--cors: invalid value 'a.example'"),
        (["--cors", "null"], 2, b"--cors: invalid value 'null'"),
        (["--cors", "https://*.example"], 2, b"--cors: invalid value 'https://*.example'"),
        (["--log", "xml"], 2, b"--log: invalid value 'xml'"),
        (["--max-open", 0], 2, b"--max-open: invalid value 0"),
        (["--model-memory", 500], 2, b"--model-memory: the unit is missing"),
        (["--model", "=shakespeare"], 2, b"--model: invalid value '=shakespeare'"),
        (["--model", "a=shakespeare", "--model", "a=b"], 1, b"model 'b' does not exist"),
        (["-m", "a=shakespeare", "-m", "a=shakespeare"], 2, b"two models have the name 'a'"),
        (["--adapter", "x=nothing"], 1, b"adapter 'nothing' does not exist"),
        (["--model", "nothing"], 1, b"model 'nothing' does not exist"),
        (["--host", "192.0.2.1"], 1, b"cannot listen on 192.0.2.1:8000"),
        (["--host", "a" * 300], 1, b"cannot listen on aaa"),
    ],
)
def test_wrong_options_are_two_lines(
    arguments: list[object], status: int, message: bytes, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["serve", *map(str, arguments)]) == status
    out, err = capsysbinary.readouterr()
    assert out == b""
    assert message in err
    assert [line.split(b":")[0] for line in err.splitlines()] == [b"error", b"hint"]


def test_white_space_around_a_key_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret\n")
    assert ServeOptions().key == "secret"
    assert ServeOptions(api_key=" other ").key == "other"


def test_missing_packages_are_named() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; from tgen.cli.app import run; "
        "sys.exit(run(['serve', '--port', '0']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=clean_environment(), check=False
    )
    assert result.returncode == 1
    assert b"error: tgen serve needs the package starlette" in result.stderr
    assert b"hint: pip install 'tgen-lm[serve]'" in result.stderr


def test_model_is_served_under_its_name_without_directories() -> None:
    for name, path, expected in (
        (None, "models/shakespeare", "shakespeare"),
        ("owner/model:Q8_0", "cache/0123", "model:Q8_0"),
        ("models/mine/", "models/mine", "mine"),
        ("x.gguf", "x.gguf", "x"),
    ):
        assert short_name(name, Path(path)) == expected


def test_models_and_adapters_have_names_and_bases(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "a=b", ignore=shutil.ignore_patterns("training"))
    path, other = str(trained), str(tmp_path / "a=b")
    adapter = str(save_adapter(tmp_path / "tuned", trained))

    def find(models: list[str], adapters: Sequence[str] = ()) -> list[tuple[str, str | None]]:
        return [(source.name, source.base) for source in find_sources(models, adapters)]

    assert find([f"x={path}", path, other]) == [("x", None), ("model", None), ("a=b", None)]
    assert find([path], [f"x={adapter}"]) == [("model", None), ("x", "model")]
    assert find([], [adapter, f"x={adapter}"]) == [
        ("model", None), ("tuned", "model"), ("x", "model")
    ]  # fmt: skip
    assert find([adapter]) == [("tuned", None)]
    assert find([adapter, f"x={path}"]) == [("tuned", "x"), ("x", None)]
    assert find([other, path], [adapter])[-1] == ("tuned", "model")
    with pytest.raises(UsageError, match=r"its base .* is not served"):
        find([other, f"x={other}"], [adapter])
    with pytest.raises(UsageError, match="two models have the name 'model'"):
        find([path, path])


def test_origins_are_those_that_browsers_send() -> None:
    given = ["HTTPS://A.example:443", "http://localhost:3000", "http://b.example:80", "*"]
    expected = ["https://a.example", "http://localhost:3000", "http://b.example", "*"]
    assert ServeOptions(api_key="x", cors=given).origins == expected


def test_memory_for_models_is_that_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(device, "choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(memory, "free_ram", lambda: 2000)
    on_gpu, on_cpu = (EngineOptions(device=name) for name in ("cuda", "cpu"))
    assert ServeOptions(engine=on_gpu).memory_bytes == 800
    assert ServeOptions(engine=on_cpu).memory_bytes == 1600
    assert ServeOptions(engine=on_gpu, model_memory="3KB").memory_bytes == 3000


def test_draft_model_is_loaded_once_for_all_models(
    trained: Path, draft_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tgen.serve import server

    models: list[LoadedModel] = []
    monkeypatch.setattr(server, "serve", lambda sources, load, *_: models.append(load(sources[0])))
    arguments = ["-m", str(trained), "--draft-model", str(draft_model), "--port", "0", "-q"]
    assert run(["serve", *arguments]) == 0
    assert models[0]._draft_model is not None
    monkeypatch.setattr(
        server, "serve", lambda sources, load, *_: models.extend(map(load, sources))
    )
    assert run(["serve", "-m", "shakespeare", "-m", f"again={trained}", *arguments]) == 0
    other, *drafted = (model._draft_model for model in models[1:])
    assert other is None
    assert drafted[0] is drafted[1] is not None


def test_a_draft_model_that_does_not_exist_is_refused_before_any_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tgen.serve import server

    monkeypatch.setattr(server, "serve", lambda *_: None)
    models = ["-m", "shakespeare", "-m", "again=shakespeare"]
    assert run(["serve", *models, "--draft-model", "nowhere", "--port", "0"]) == 1
    assert "--draft-model: model 'nowhere' does not exist" in capsys.readouterr().err
