"""Several models in one server: their texts, their memory, and their names."""

import asyncio
import gc
import json
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.adapters import save_adapter
from support.command import tgen
from support.models import make_model
from support.servers import ServerProcess, serving
from tgen.checkpoint import model_dir
from tgen.cli.serve import find_sources
from tgen.config import EngineOptions
from tgen.errors import ModelError
from tgen.loaded_model import LoadedModel, open_model
from tgen.serve import models
from tgen.serve.engine_thread import Job
from tgen.serve.http_error import HttpError
from tgen.serve.models import (
    ModelSettings,
    ModelSource,
    ServedModels,
    describe_source,
    tagged,
)
from tgen.tokenizer import Tokenizer

OPTIONS = {"prompt": "What is", "max_tokens": 20, "seed": 3}


@pytest.fixture(scope="module")
def other(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of another model."""
    path = tmp_path_factory.mktemp("other") / "other"
    model = make_model("gpt2", vocab_size=tokenizer.vocab_size)
    model_dir.save(path, model.config, tokenizer, model.to_arrays())
    return path


@pytest.fixture(scope="module")
def adapter(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an adapter of the chat model."""
    return save_adapter(tmp_path_factory.mktemp("adapter") / "tuned", chat_model)


@pytest.fixture(scope="module")
def several(chat_model: Path, other: Path, adapter: Path) -> Iterator[ServerProcess]:
    """Return a server of three models whose memory has room for one and its adapter."""
    options = ["-m", other, "--adapter", f"fine={adapter}", "--model-memory", "1KB"]
    with serving(f"a b={chat_model}", *options, log="json") as server:
        yield server


def ask(server: ServerProcess, **fields: Any) -> Any:
    answer = server.post("/v1/completions", OPTIONS | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_name_gives_the_texts_of_its_model_alone(
    several: ServerProcess, served: ServerProcess, other: Path, chat_model: Path, adapter: Path
) -> None:
    expected = {"a b": ask(served)["choices"][0]["text"]}
    with serving(other) as server:
        expected["other"] = ask(server)["choices"][0]["text"]
    arguments = ["-p", "What is", "-n", 20, "--seed", 3, "--threads", 1, "--quiet"]
    for name, path, more in (("other", other, []), ("fine", chat_model, ["--adapter", adapter])):
        text = tgen("generate", "-m", path, *more, *arguments).stdout.decode(errors="replace")
        assert text.rstrip("\n") == expected.setdefault(name, text.rstrip("\n")).rstrip("\n")
    assert len({*expected.values()}) == 3
    for name in ("a b", "other", "fine", "a b", "other"):
        answer = ask(several, model=name)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
    assert ask(several)["model"] == "a b"  # the first one


def test_an_adapter_of_another_base_is_an_error_at_the_start(other: Path, adapter: Path) -> None:
    with pytest.raises(ModelError, match="tuned"):
        find_sources([str(other)], [f"fine={adapter}"])


def test_models_are_listed_by_name_and_no_path_is_one(
    several: ServerProcess, chat_model: Path, adapter: Path
) -> None:
    models = several.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["a b", "other", "fine"]
    assert [model["max_model_len"] for model in models] == [2048, 48, 2048]
    assert [model.get("parent") for model in models] == [None, None, "a b"]
    for name in ("a b", "a b:latest"):  # clients of Ollama send the tag
        assert several.http.get(f"/v1/models/{name}").json() == models[0]
    answer = several.post("/v1/completions", OPTIONS | {"model": "other:latest"})
    assert answer.json()["model"] == "other"
    for name in (str(chat_model), f"../{chat_model.name}", adapter.name, "", "a"):
        answer = several.post("/v1/completions", OPTIONS | {"model": name})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message.endswith("does not exist; this server has 'a b', 'other', 'fine'")


def test_a_name_has_one_tag() -> None:
    for name, expected in (
        ("other", "other:latest"),
        ("hf.co:443/a", "hf.co:443/a:latest"),
        ("smollm2:135m", "smollm2:135m"),
        ("x:latest", "x:latest"),
    ):
        assert tagged(name) == expected
        source = ModelSource(
            name=name, path=Path(name), adapter=None, base=None, context_length=8, n_bytes=1
        )
        served = ServedModels([source], pytest.fail, ModelSettings(batch_size=1, queue_size=1))
        assert served.find(expected.removesuffix(":latest")) is served.find(expected) is source


def test_a_model_that_cannot_be_loaded_is_an_error_without_its_path(
    chat_model: Path, other: Path, tmp_path: Path
) -> None:
    shutil.copytree(other, tmp_path / "gone")
    with serving(chat_model, "-m", tmp_path / "gone", log="text") as server:
        weights = tmp_path / "gone" / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-8])
        for _ in range(2):
            answer = server.post("/v1/completions", OPTIONS | {"model": "gone"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_not_loaded"
            assert int(answer.headers["retry-after"]) >= 1
            assert str(tmp_path) not in answer.text
        ask(server)
        weights.write_bytes(content)
        ask(server, model="gone")
        server.process.terminate()
        _, log = server.process.communicate(timeout=900)
    assert b"the model gone cannot be loaded" in log
    *lines, last = log.decode().splitlines()
    start = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
    lines = [line for line in lines if re.match(start + "POST", line)]
    assert re.fullmatch(start + r"POST /v1/completions 503 seconds=\d+\.\d+", lines[0])
    tokens = r"prompt_tokens=\d+ new_tokens=20"
    expected = rf"POST /v1/completions 200 seconds=\d+\.\d+ model=gone {tokens} seed=3"
    assert re.fullmatch(start + expected, lines[-1])
    assert re.match(start + r"requests=4 errors=2 prompt_tokens=\d+ new_tokens=40 ", last)


class Opener:
    """Counts what is loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.alive: list[weakref.ref[LoadedModel]] = []

    def __call__(self, source: ModelSource) -> LoadedModel:
        options = EngineOptions(device="cpu", threads=1)
        model = open_model(source.path, options, adapter=source.adapter)
        self.names.append(source.name)
        self.alive.append(weakref.ref(model))
        return model


def run(sources: list[ModelSource], test: Any, memory_bytes: int | None) -> Opener:
    opener = Opener()

    async def main() -> None:
        settings = ModelSettings(batch_size=2, queue_size=9, memory_bytes=memory_bytes)
        models = ServedModels(sources, opener, settings)
        try:
            async with asyncio.timeout(900):
                await test(models)
        finally:
            models.stop()
            models.join(900)

    asyncio.run(main())
    return opener


def names(models: ServedModels) -> list[str]:
    return [served.source.name for served in models.loaded]


async def generate(models: ServedModels, name: str) -> Job:
    """Start a text."""
    with models.visit(name) as visit:
        await visit.ready
        served = models.get(name)
    served.engine.reserve(1)
    sampling = served.model.sampling({"max_new_tokens": 5, "json_schema": {"type": "array"}})
    job = Job([served.model.request([5, 6], sampling)], stream=True)
    served.engine.submit(job)
    return job


async def finish(job: Job) -> None:
    events = await job.events()
    while not events[-1][1].last:
        events = await job.events()


def test_the_least_recently_used_model_is_unloaded(other: Path) -> None:
    sources = [describe_source(name, other, None, None) for name in "abc"]

    async def test(models: ServedModels) -> None:
        for name in ("a", "b", "a", "c"):
            await finish(await generate(models, name))
        assert names(models) == ["a", "c"]

    # Packed weights have 1.7 times the size of these files.
    assert run(sources, test, 4 * sources[0].n_bytes).names == ["a", "b", "c"]


def test_unloaded_models_are_freed_and_a_base_stays_with_its_adapter(
    other: Path, chat_model: Path, adapter: Path
) -> None:
    sources = [describe_source("a", other, None, None)]
    sources += [describe_source("base", chat_model, None, None)]
    sources += [describe_source("fine", chat_model, adapter, "base")]

    async def test(models: ServedModels) -> None:
        await finish(await generate(models, "a"))
        await finish(await generate(models, "fine"))
        assert names(models) == ["fine", "base"]
        fine, base = models.loaded
        weights = fine.model.engine.weight_bytes
        assert weights < base.model.engine.weight_bytes
        await finish(await generate(models, "base"))
        assert names(models) == ["fine", "base"]
        del fine, base
        await finish(await generate(models, "a"))
        assert names(models) == ["a"]

    opener = run(sources, test, 1)
    assert opener.names == ["a", "base", "fine", "a"]
    gc.collect()
    assert [model() for model in opener.alive] == [None] * 4


async def visit(models: ServedModels, name: str) -> None:
    with models.visit(name) as one:
        await one.ready


def test_a_model_that_generates_is_not_unloaded(other: Path) -> None:
    sources = [describe_source(name, other, None, None) for name in "abc"]

    async def test(models: ServedModels) -> None:
        await finish(await generate(models, "a"))
        engine = models.get("a").engine
        engine.reserve(1)  # a text, which ends when the test says so
        b, c, again = (asyncio.create_task(visit(models, name)) for name in "bca")
        while not models._lacks_room:
            await asyncio.sleep(0)
        late = asyncio.create_task(visit(models, "a"))  # waits for its turn, though it is loaded
        c.cancel()  # its client leaves
        with suppress(asyncio.CancelledError):
            await c
        assert names(models) == ["a"]
        assert not late.done()
        engine.release(1)
        await asyncio.gather(b, again, late)
        assert names(models) == ["a"]

    assert run(sources, test, 1).names == ["a", "b", "a"]


def test_a_model_stays_until_those_who_waited_for_it_have_used_it(other: Path) -> None:
    sources = [describe_source(name, other, None, None) for name in "ab"]

    async def test(models: ServedModels) -> None:
        first = ExitStack()
        of_a = first.enter_context(models.visit("a"))
        with models.visit("b") as of_b:
            await of_a.ready
            while not models._lacks_room:
                await asyncio.sleep(0)
            assert names(models) == ["a"]
            first.close()
            await of_b.ready
            assert names(models) == ["b"]

    assert run(sources, test, 1).names == ["a", "b"]


def test_a_model_whose_client_has_left_is_loaded_once(other: Path) -> None:
    async def test(models: ServedModels) -> None:
        leaving = asyncio.create_task(visit(models, "a"))
        while models._loader is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        await visit(models, "a")
        assert names(models) == ["a"]
        with pytest.raises(HttpError) as error:
            await visit(models, "b")
        assert error.value.status == 404
        models.drain()
        with pytest.raises(HttpError, match="shutting down"):
            models.check_open()

    assert run([describe_source("a", other, None, None)], test, None).names == ["a"]


def test_a_bug_after_loading_is_an_error_of_those_who_wait(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(models: ServedModels) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(models, "add", lambda *_: 1 / 0)
            with pytest.raises(HttpError) as error:
                await visit(models, "a")
        assert error.value.status == 500
        await visit(models, "a")
        assert names(models) == ["a"]

    run([describe_source("a", other, None, None)], test, None)


def test_many_clients_of_models_that_share_little_memory_get_their_texts(
    several: ServerProcess,
) -> None:
    cases = [(name, seed) for seed in range(4) for name in ("a b", "other", "fine")] * 2

    def ask_one(case: tuple[str, int]) -> str:
        return str(ask(several, model=case[0], seed=case[1])["choices"][0]["text"])

    with ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(ask_one, cases)]
    half = len(cases) // 2
    assert answers[:half] == answers[half:]
    assert len({*answers}) == half


def test_the_log_is_one_json_object_per_line(several: ServerProcess) -> None:
    several.http.get("/v1/models?key=secret")
    several.http.get("/v1/%0Ax y\u00e9")
    several.process.terminate()
    _, log = several.process.communicate(timeout=900)
    assert b"secret" not in log
    assert b"What" not in log
    rows = [row for row in map(json.loads, log.splitlines()) if "message" not in row]
    *rows, bad, last = rows
    assert (bad["method"], bad["path"], bad["status"]) == ("GET", "/v1/%0Ax%20y%C3%A9", 404)
    [asked, *_] = [row for row in rows if row.get("model") == "fine"]
    assert (asked["method"], asked["path"], asked["status"]) == ("POST", "/v1/completions", 200)
    assert (asked["new_tokens"], asked["seed"]) == (20, 3)
    assert last["requests"] == len(rows) + 1
    assert last["errors"] == sum(row["status"] >= 400 for row in [*rows, bad])


def test_a_call_that_is_cancelled_before_it_starts_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    works: list[Any] = []

    class Waiting:
        def __init__(self, *, target: Any, args: Any, **_: Any) -> None:
            works.append(partial(target, *args))

        def start(self) -> None:
            """Wait until the test calls `target`."""

    monkeypatch.setattr(threading, "Thread", Waiting)

    async def cancel() -> None:
        task = asyncio.create_task(models._run(calls.append, "x"))
        while not works:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        works[0]()

    asyncio.run(cancel())
    assert calls == []
