"""Access to the server, its limits, and its end."""

import gzip
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from support.command import tgen
from support.servers import JSON, LONG, ServerProcess, serving

KEY = "a key with ümläut"
ORIGIN = "https://a.example"


@pytest.fixture(scope="module")
def strict(chat_model: Path) -> Iterator[ServerProcess]:
    """Return a strict server with a key, one row, a queue of one text and a small body limit, which
    the pages of two origins may use."""
    limits = ["--batch-size", 1, "--queue", 1, "--max-body", "2MB", "--strict"]
    origins = ["--cors", ORIGIN, "--cors", "app://obsidian.md"]
    with serving(chat_model, *limits, *origins, key=KEY) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/", "/health/x"])
def test_without_the_key_there_is_nothing(strict: ServerProcess, path: str) -> None:
    keys = [b"Bearer " + key.encode() for key in (KEY + "x", KEY[:-1], "x")]
    with httpx2.Client() as stranger:
        for key in (*keys, KEY.encode(), b"Basic " + KEY.encode(), b""):
            for method in ("GET", "POST", "OPTIONS"):
                headers = {"Authorization": key} if key else {}
                answer = stranger.request(method, strict.url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert stranger.get(strict.url + "/health").status_code == 200
    assert strict.http.get(path).status_code != 401


def test_strict_server_refuses_more_tokens_than_fit(strict: ServerProcess) -> None:
    for n, param in ((2048, "prompt"), (2049, "max_tokens")):
        answer = strict.post("/v1/completions", {"prompt": "What is", "max_tokens": n})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize("origin", [ORIGIN, "app://obsidian.md", "https://b.example", "null"])
def test_only_named_origins_may_use_the_server(strict: ServerProcess, origin: str) -> None:
    path, headers = "/v1/completions", {"Origin": origin}
    wanted = {"Access-Control-Request-Method": "POST"}
    wanted |= {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    wanted["Access-Control-Request-Private-Network"] = "true"
    with httpx2.Client() as page:  # a preflight has no key
        preflight = page.options(strict.url + path, headers=headers | wanted)
        stranger = page.post(strict.url + path, headers=headers | JSON, content=b"{}")
    answer = strict.http.post(
        path, headers=headers | JSON, content=b'{"prompt": "x", "max_tokens": 2, "seed": 1}'
    )
    is_named = origin in (ORIGIN, "app://obsidian.md")
    assert [preflight.status_code, stranger.status_code] == [200 if is_named else 400, 401]
    assert answer.status_code == 200
    for one in (preflight, stranger, answer):
        allowed = one.headers.get("access-control-allow-origin")
        assert allowed == (origin if is_named else None)
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]


def test_key_comes_from_the_environment_and_a_taken_port_is_named(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import openai

    monkeypatch.setenv("TGEN_API_KEY", "secret")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with serving(chat_model) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        assert server.client(api_key="secret").models.list().data
        taken = tgen("serve", "-m", chat_model, "--port", server.port)
        assert taken.returncode == 1
        where = f"127.0.0.1:{server.port}"
        assert f"error: cannot listen on {where}".encode() in taken.stderr
        assert b"hint: choose another --port" in taken.stderr
        server.process.kill()  # leaves nothing behind
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setenv("TGEN_API_KEY", "")
    assert tgen("serve", "-m", chat_model, "--port", 0).returncode == 2


def test_server_listens_on_its_address_only(strict: ServerProcess) -> None:
    assert strict.url == f"http://127.0.0.1:{strict.port}"
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection((_other_address(), strict.port), timeout=5)


def _other_address() -> str:
    """Return an address of this machine that other machines see, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def test_body_limit_holds_for_stated_and_unstated_lengths(strict: ServerProcess) -> None:
    big = b'{"prompt": "' + b"x" * 3_000_000 + b'"}'
    for content in (big, iter([big[i : i + 100_000] for i in range(0, len(big), 100_000)])):
        answer = strict.http.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 413
        assert "2,000,000 bytes" in answer.json()["error"]["message"]
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + key
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        connection.sendall(head + b"Content-Length: 2000000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


SMALL = b'{"prompt": "x", "max_tokens": 2, "seed": 1}'


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(SMALL), 200),
        ("X-GZIP", gzip.compress(SMALL), 200),
        ("identity", SMALL, 200),
        ("gzip", gzip.compress(SMALL + b" " * 2_000_000), 413),
        ("gzip", gzip.compress(SMALL + b" " * (2_000_000 - len(SMALL))), 200),
        ("gzip", gzip.compress(b" " * 50_000_000), 413),
        ("gzip", gzip.compress(SMALL)[:-1], 400),
        ("gzip", gzip.compress(SMALL) + b"x", 400),
        ("gzip", SMALL, 400),
        ("gzip", b"", 400),
        ("br", SMALL, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(SMALL)), 415),
    ],
    ids=lambda value: str(value)[:20],
)
def test_compressed_bodies_have_the_same_limit(
    strict: ServerProcess, encoding: str, body: bytes, status: int
) -> None:
    headers = JSON | {"Content-Encoding": encoding}
    answer = strict.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 200:
        plain = strict.http.post("/v1/completions", content=SMALL, headers=JSON)
        assert answer.json()["choices"] == plain.json()["choices"]
    assert answer.headers.get("accept-encoding") == ("gzip" if status == 415 else None)


def test_endless_header_is_cut(strict: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", strict.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(b"x" * 50_000_000)


def test_full_queue_is_429_until_it_empties(strict: ServerProcess) -> None:
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with strict.long_stream(), socket.create_connection(("127.0.0.1", strict.port)) as waiting:
        lines = [head.encode(), b"Content-Type: application/json\r\n"]
        lines += [b"Authorization: Bearer " + KEY.encode(), b"\r\n\r\n"]
        waiting.sendall(b"".join(lines) + body)
        while not strict.metric("num_requests_waiting"):
            pass
        full = strict.post("/v1/completions", LONG)
        assert full.status_code == 429
        assert full.json()["error"]["code"] == "queue_full"
        assert int(full.headers["retry-after"]) >= 1
    strict.wait_until_free()
    assert strict.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_sigterm_finishes_running_texts_and_refuses_new_ones(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(chat_model, "--batch-size", 2, "--drain-timeout", 900) as server:
        with server.long_stream(n=4) as running:  # two of them are in the queue
            server.process.send_signal(signal.SIGTERM)
            while (health := server.http.get("/health")).status_code == 200:
                pass
            assert health.status_code == 503
            with pytest.raises(openai.InternalServerError) as error:
                server.client().completions.create(model=server.model, prompt="x")
            assert error.value.code == "shutting_down"
            assert int(error.value.response.headers["retry-after"]) >= 1
            *events, end = running
        assert end == "data: [DONE]"
        assert sum('"finish_reason":"length"' in event for event in events) == 4
        assert server.process.wait(900) == 0
        assert server.process.stderr
        assert server.process.stderr.read() == b""
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("stop", ["bound", "second signal"])
def test_texts_that_do_not_end_in_time_are_cut_visibly(chat_model: Path, stop: str) -> None:
    options = ["--drain-timeout", 0 if stop == "bound" else 60, "--batch-size", 2]
    with serving(chat_model, *options) as server:
        with server.long_stream(n=16) as running:
            server.process.send_signal(signal.SIGINT)
            if stop == "second signal":
                while server.http.get("/health").status_code == 200:
                    pass
                server.process.send_signal(signal.SIGINT)
            *_, end = running
        assert json.loads(end.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.process.wait(900) == 0


BLOCKED = """
import sys, threading
import tgen.serve.app
from tgen.cli import app
tgen.serve.app.prepare = lambda *_, **__: threading.Event().wait()
app.main()
"""


def test_second_signal_ends_the_server_whatever_runs(chat_model: Path) -> None:
    command = [sys.executable, "-c", BLOCKED, "serve", "-m", chat_model, "--port", "0"]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE) as process:
        server = ServerProcess(process, None)
        body = b'{"prompt": "x"}'  # without a constraint, which would be compiled first
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            while not server.metric("num_requests_waiting"):
                pass
            process.send_signal(signal.SIGTERM)
            while server.http.get("/health").status_code == 200:
                pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(900) == 0


LOADING = """
import sys, threading
from tgen.cli import app, serve
def load(*_, **__):
    print("loading", file=sys.stderr, flush=True)
    threading.Event().wait()
serve.load_model = load
app.main()
"""


def test_a_model_that_is_being_loaded_does_not_delay_the_end(chat_model: Path) -> None:
    models = ["-m", chat_model, "-m", f"other={chat_model}"]
    command = [sys.executable, "-c", LOADING, "serve", *models, "--port", "0"]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE) as process:
        server = ServerProcess(process, None)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert process.stderr
            while b"loading" not in process.stderr.readline():
                pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(900) == 0
