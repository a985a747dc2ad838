"""Grammars that take too long or too much memory end their own request alone."""

import asyncio
import json
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.servers import serving
from tgen.errors import TgenError, UsageError
from tgen.loaded_model import LoadedModel, open_model
from tgen.machine import child
from tgen.serve import grammar_check, grammar_child
from tgen.serve.grammar_check import GrammarCheck
from tgen.serve.http_error import HttpError


def body(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "x", "max_tokens": 5, "response_format": form}


def slow(n: int) -> dict[str, Any]:
    return body({"type": "integer", "multipleOf": n})  # minutes


def test_others_are_answered_while_slow_grammars_compile(chat_model: Path) -> None:
    with serving(chat_model, "--grammar-timeout", 0.5, "--queue", 4) as server:
        path, numbers = "/v1/completions", (9_999_991, 9_999_973, 9_999_991)

        def ask(n: int) -> httpx2.Response:
            return httpx2.post(server.url + path, json=slow(n), timeout=900)

        with ThreadPoolExecutor() as pool:
            answers = pool.map(ask, numbers)
            assert server.post(path, {"prompt": "x", "max_tokens": 1}).status_code == 200
        for answer in answers:
            error = answer.json()["error"]
            if answer.status_code == 429:  # a busy machine leaves slow grammars too little time
                assert error["code"] == "overloaded"
            else:
                assert (answer.status_code, error["param"]) == (400, "response_format")


@pytest.mark.parametrize(
    ("delay", "error", "message"),
    [
        (1000, UsageError, "json_schema: takes more than 0.2 s to compile"),
        (0, HttpError, "too busy to compile"),
    ],
)
def test_slow_grammars_are_refused(
    chat_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    delay: int,
    error: type[TgenError],
    message: str,
) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_DELAY", delay)

    async def compile_all() -> None:
        check = grammar_check.GrammarCheck(open_model(chat_model).vocabulary, 0.2)
        for _ in range(2):
            with pytest.raises(error, match=message):
                await check.check({"json_schema": {"type": "integer", "multipleOf": 9_999_991}})
        monkeypatch.setattr(grammar_check, "_MAX_DELAY", 1000)
        await check.check({"json_schema": {"enum": ["a", "b"]}})
        assert check._process is not None
        check.close()
        await check._process.wait()

    asyncio.run(compile_all())


def test_sigterm_refuses_requests_that_wait_for_their_grammar(chat_model: Path) -> None:
    with serving(chat_model, "--drain-timeout", 900) as server, ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "/v1/completions", slow(9_999_991))
        while not server.metric("num_requests_waiting"):
            pass
        server.process.send_signal(signal.SIGTERM)
        assert waiting.result().status_code == 503
        assert waiting.result().json()["error"]["code"] == "shutting_down"
        assert server.process.wait(900) == 0
        assert server.process.stderr
        assert server.process.stderr.read() == b""


def test_many_grammars_at_once_and_later_are_compiled(chat_model: Path) -> None:
    with serving(chat_model) as server:

        def ask(n: int) -> int:
            schema = {"enum": [f"a{n}", "b"]}
            return server.post("/v1/completions", body(schema)).status_code

        with ThreadPoolExecutor(24) as pool:
            assert {*pool.map(ask, range(24))} == {200}
        assert ask(99) == 200


def test_client_that_leaves_cancels_its_grammar(chat_model: Path) -> None:
    with serving(chat_model, "--queue", 1) as server:
        content = json.dumps(slow(9_999_991)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + content)
            while not server.metric("num_requests_waiting"):
                pass
        server.wait_until_free()
        answer = server.post("/v1/completions", body({"type": "boolean"}))
        assert answer.status_code == 200, answer.text


def test_process_that_is_cancelled_after_its_answer_is_not_used_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = Pipe()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    theirs.send({"message": "no"})
    fork, idle = grammar_child._Fork(process.pid, ours), list[grammar_child._Fork]()
    fork.kill()
    grammar_child._finish(3, fork, idle)
    assert json.loads(capsys.readouterr().out) == {"id": 3, "message": "no"}
    assert idle == []
    process.communicate()


def test_stderr_of_the_process_is_not_that_of_the_server(
    loaded: LoadedModel, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = child.command

    def loud(*program: str) -> list[str]:
        return ["sh", "-c", 'echo panic >&2; exec "$@"', "sh", *command(*program)]

    monkeypatch.setattr(child, "command", loud)

    async def compile_one() -> None:
        check = GrammarCheck(loaded.vocabulary, 900)
        await check.check({"regex": "a"})
        assert check._process is not None
        check.close()
        await check._process.wait()

    asyncio.run(compile_one())
    assert capfd.readouterr().err == ""
