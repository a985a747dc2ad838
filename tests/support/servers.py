"""`tgen serve` as a process, and its clients."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from support.command import start

if TYPE_CHECKING:
    import openai

JSON = {"Content-Type": "application/json"}
_SCHEMA = {"type": "string", "pattern": "^[a-z]{9000}$"}
# A text that only its length ends.
LONG: dict[str, Any] = {
    "prompt": "What",
    "max_tokens": 2000,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
}


class ServerProcess:
    """A running `tgen serve` on a free port; `http` sends the key, if there is one."""

    def __init__(self, process: subprocess.Popen[bytes], key: str | None) -> None:
        assert process.stderr
        self.process, lines = process, b""
        while not (found := re.search(rb'serving (\S+) on ([^\s"]+)', lines)):
            line = process.stderr.readline()
            assert line, lines.decode()
            lines += line
        self.model, self.url = (part.decode() for part in found.groups())
        self.port = int(self.url.rpartition(":")[2])
        self.key = key or "none"
        headers = {"Authorization": b"Bearer " + self.key.encode()}
        self.connections = ExitStack()
        http = httpx2.Client(base_url=self.url, headers=headers, timeout=900)
        self.http = self.connections.enter_context(http)

    def client(self, **options: Any) -> "openai.OpenAI":
        """Return the official client, which does not try again."""
        import openai  # takes seconds: only where it is used

        options = {"api_key": self.key, "max_retries": 0, "timeout": 900} | options
        client = openai.OpenAI(base_url=f"{self.url}/v1", **options)
        return self.connections.enter_context(client)

    def post(self, path: str, body: Any) -> httpx2.Response:
        """Return the response to any JSON, unpaired surrogates included."""
        return self.http.post(path, content=json.dumps(body).encode(), headers=JSON)

    @contextmanager
    def long_stream(self, n: int = 1) -> Iterator[Iterator[str]]:
        """Yield the lines of a stream of `n` long texts that has started."""
        content = json.dumps(LONG | {"stream": True, "n": n}).encode()
        with self.http.stream("POST", "/v1/completions", content=content, headers=JSON) as response:
            assert response.status_code == 200, response.read()
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            yield lines

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        text = self.http.get("/metrics").text
        found = re.search(rf"^tgen_{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def wait_until_free(self) -> None:
        """Wait until no text is running or waiting."""
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            pass


@contextmanager
def serving(
    model: object, *options: object, key: str | None = None, log: str = "off"
) -> Iterator[ServerProcess]:
    """Start a server, and end it with SIGTERM unless it has ended."""
    keys = [] if key is None else ["--api-key", key]
    arguments = ["-m", model, "--port", 0, "--threads", 1, *keys]
    # A busy machine compiles slowly.
    arguments += ["--grammar-timeout", 900, "--log", log, *options]
    with start("serve", *arguments, stderr=subprocess.PIPE) as process:
        try:
            server = ServerProcess(process, key)
            with server.connections:
                yield server
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=900)
