"""HTTP requests of all endpoints of `tgen serve`, sent to its connections without a socket."""

import asyncio
import gzip
import json
import logging
import re
import time
from pathlib import Path
from random import Random
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

import tgen
from fuzz.exchange import Response, exchange
from fuzz.models import save_model
from fuzz.mutations import ESCAPES, Mutator, dump
from tgen.config import EngineOptions
from tgen.errors import TgenError
from tgen.loaded_model import open_model
from tgen.serve import http_response
from tgen.serve.access_log import AccessLog
from tgen.serve.app import Service, ServiceLimits
from tgen.serve.models import ModelSettings, ServedModels, describe_source
from tgen.tokenizer import Tokenizer, train_char

_TEMPLATE = (  # with tools, in Hermes' syntax
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", None]}},
    "required": ["a"],
}
_FUNCTION = {"name": "now", "description": "time", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
_USER = {"role": "user", "content": "hi"}
_CALLED = [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
_CALLED += [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "é"}]}]
_SAID = {"role": "assistant", "content": "a"}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "é"},
]
_OLLAMA_CALL = {"function": {"name": "now", "arguments": {"a": 1}}}
_OLLAMA = [_USER, {"role": "assistant", "content": "", "tool_calls": [_OLLAMA_CALL]}]
_OLLAMA += [{"role": "tool", "content": "é"}]
_LOGPROBS = "message.output_text.logprobs"
_FLAT_TOOL = {"type": "function", **_FUNCTION}
_OPTIONS = {"num_predict": 3, "seed": 1, "num_ctx": 64, "repeat_penalty": 1.1}
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _SCHEMA}}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_PLAIN = {"prompt": "a", "max_tokens": 3, "seed": 1}
_SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["x", "y"], "n": 2},
    {"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.1, "seed": -1},
    {"logit_bias": {"65": 5, "66": -100}, "bias": {"a": 2}, "ban": ["b"], "require": ["c"]},
    {"typical_p": 0.9, "top_n_sigma": 1, "xtc_probability": 0.5, "samplers": ["top_k", "min_p"]},
    {"dry_multiplier": 1, "dry_breakers": ["\n"], "no_repeat_ngram": 2, "penalty_window": 9},
    {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [65], "until_newline": True},
]
_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", **_PLAIN, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "best_of": 3, "user": "u"}),
    ("/v1/completions", {"prompt": [[65, 66], [67]], **_STREAM, "logprobs": 1, "max_tokens": 0}),
    ("/v1/completions", {"model": "plain", "prompt": "a", "suffix": "", "max_tokens": -1}),
    *(("/v1/completions", {**_PLAIN, **fields}) for fields in _SAMPLING),
    ("/v1/completions", {"prompt": "a", "n_predict": 3, "grammar": 'root ::= "a" [b-c]{1,3}'}),
    ("/v1/completions", {**_PLAIN, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/completions", {**_PLAIN, "guided_regex": r"\d{1,2}[a-z]+", **_STREAM}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, _USER], "n": 2}),
    ("/v1/chat/completions", {"messages": [_USER], "logprobs": True, "top_logprobs": 2, **_STREAM}),
    ("/v1/chat/completions", {"messages": [_USER], "response_format": _FORM, **_STREAM}),
    ("/v1/chat/completions", {"messages": _CALLED, "tools": [_TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": [_USER], "tools": [_TOOL], "parallel_tool_calls": False}),
    ("/v1/chat/completions", {"messages": [_USER, _SAID], "continue_final_message": True}),
    ("/v1/chat/completions", {"messages": [_USER], "max_completion_tokens": 2, "seed": 5}),
    ("/v1/responses", {"input": "hi", "instructions": "s", "max_output_tokens": 4, "stream": True}),
    ("/v1/responses", {"input": _ITEMS, "include": [_LOGPROBS], "top_logprobs": 1}),
    ("/v1/responses", {"input": "hi", "tools": [_FLAT_TOOL], "tool_choice": _FLAT_TOOL, **_STREAM}),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}, "store": False}),
    ("/api/generate", {"model": "tiny:latest", "prompt": "a", "system": "s", "format": "json"}),
    ("/api/generate", {"model": "tiny", "prompt": "a", "raw": True, "options": _OPTIONS}),
    ("/api/chat", {"model": "tiny", "messages": _OLLAMA, "tools": [_TOOL], "stream": False}),
    ("/api/generate", {"model": "plain", "prompt": "a", "options": _OPTIONS, "stream": False}),
    ("/api/chat", {"model": "tiny", "messages": [_USER], "format": _SCHEMA, "keep_alive": "5m"}),
    ("/api/show", {"model": "tiny", "verbose": True}),
    ("/tokenize", {"content": "aé", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [65, 195], "model": "plain"}),
    ("/apply-template", {"messages": _CALLED, "tools": [_TOOL]}),
    ("/v1/embeddings", {"input": "a", "model": "tiny", "encoding_format": "float"}),
    ("/tgen/model", {"model": "plain"}),
    ("/tgen/tokens", {"model": "tiny", "bytes": "YcOp", "top": 3}),
    ("/tgen/tokens", {"messages": _CALLED[:1], "top": 0}),
    ("/tgen/generate", {**_PLAIN, "prompt": [65, 66], "logprobs": 3, "stream": True}),
    ("/tgen/next", {"model": "plain", "ids": [65, 66, 67]}),
    ("/tgen/cache", {"ids": [65], "length": 9}),
    ("/tgen/sources", {"text": "a b"}),
    ("/tgen/heads", {"ids": [65, 66, 67]}),
    ("/tgen/attention", {"ids": [65, 66, 67], "layer": 1, "head": 1}),
    ("/tgen/lens", {"ids": [65, 66, 67], "query": 2}),
    ("/tgen/why", {"ids": [65, 66, 67], "query": 1, "target": 67}),
]
_PATHS = ["/", "/health", "/metrics", "/v1/models", "/v1/models/tiny", "/api/version", "/api/tags"]
_PATHS += ["/props?model=plain", "http://127.0.0.1/v1/models/", "/favicon.ico", "*", "/api/embed"]
_PATHS += ["/tgen/page/app.js", "/tgen/page/..%2fapp.py", "/tgen/page/", "/tgen/model?model=tiny"]
_PATHS += ["/v1/models/%ff%00%0a", "/v1/models/..%2f..%2fetc%2fpasswd", "/props?model=%ff&model=x"]
_HOST = {"host": "127.0.0.1:8000"}
_JSON = {**_HOST, "content-type": "application/json"}
_HEADERS = [
    *("content-encoding: gzip", "content-encoding: br", "content-encoding: gzip, gzip"),
    *("content-type: text/plain", "content-type: application/json; charset=utf-16", "content-type"),
    *("content-length: 0", "content-length: -1", "content-length: 1e3", "content-length: 5"),
    *(f"content-length: {'9' * 30}", "content-length: \xb2", "transfer-encoding: chunked"),
    *("transfer-encoding: gzip, chunked", "expect: 100-continue", "connection: close"),
    *("connection: upgrade\r\nupgrade: websocket", "host: evil.example", "host: [::1]:x"),
    *("host:", f"host: {'a' * 300}", "host: 127.0.0.1:\xb2", "authorization: Bearer key"),
    *("authorization: Bearer", "authorization: Basic a2V5", f"authorization: Bearer {ESCAPES}"),
    *("origin: https://page.example", "origin: null", f"x: {'a' * 70_000}", "accept: text/html"),
    *("access-control-request-method: POST", "x-forwarded-for: \xff", " folded", ": x", "x y: z"),
]  # fmt: skip
_KEY = "authorization: Bearer key"
_METHODS = ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "GET", "POST", "M" * 99]
_PIECES = [b"\r\n", b"\n", b"\0", b" ", b"\xff", b'"', b"{", b"]", b"\\", b"9" * 5000, b"\r\n\r\n"]
_PIECES += [b"%00", b"%ff", b"%2e%2e/", b"?", b"#", b"//", b";", b"NaN", b"\\ud800", b"HTTP/1.0"]
_VALUE = re.compile(rb'(?<=: )("[^"\\]*"|[\d.]+|true|false|null)')
_NESTS = [(b"[", b"]"), (b'{"a":', b"}"), (b'{"not":', b"}"), (b'{"anyOf":[', b"]}")]
_NESTS += [(b'{"properties":{"a":', b"}}"), (b'{"items":', b"}")]
_CPU_SECONDS = 10.0
_LOG_LINE = re.compile(rb"[!-~]+( [!-~]+)+\n")
_SECRETS = [str(Path(tgen.__file__).parent), "site-packages"]  # besides the model's directory


class Requests:
    """Requests to a server of two models, one of which has a template with tools."""

    prints = False
    starts_processes = True

    def __init__(self, folder: Path) -> None:
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # as in `server.serve`
        logging.getLogger("tgen.serve").addFilter(self._note_record)
        http_response._PACE = 0.001
        self._secrets = [*_SECRETS, str(folder)]
        self._failures: list[BaseException] = []
        self._log_lines: list[bytes] = []
        tokenizer = json.loads(train_char(["é".encode()]).json)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        n = len(tokenizer["model"]["vocab"])
        for i, name in enumerate(("<|im_start|>", "<|im_end|>"), n):
            tokenizer["added_tokens"].append({"id": i, "content": name, "special": True, **flags})
        save_model(
            folder / "tiny", "llama", tokenizer=Tokenizer(json.dumps(tokenizer)), context_length=512
        )
        save_model(folder / "plain", "gpt2", context_length=32)
        file = folder / "tiny" / "tokenizer_config.json"
        template = {"chat_template": _TEMPLATE, "eos_token": "<|im_end|>"}
        file.write_text(json.dumps(json.loads(file.read_bytes()) | template))
        self._bodies = [(path, Mutator(body)) for path, body in _BODIES]
        post = [
            {"method": "POST", "path": path, "headers": _JSON, "body": b} for path, b in _BODIES
        ]
        get = [{"method": "GET", "path": path, "headers": _HOST} for path in _PATHS]
        self._requests = [Mutator(request) for request in (*post, *get, *get)]
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start(folder))
        self._path, self._raw, self._leaves, self._n = "", b"", False, 0
        self._known = self._ask()

    async def _start(self, folder: Path) -> None:
        """Build two servers of the same models as `server.serve` does, one with a key."""
        models = ServedModels(
            [describe_source(name, folder / name, None, None) for name in ("tiny", "plain")],
            lambda source: open_model(source.path, EngineOptions(device="cpu", threads=1)),
            ModelSettings(batch_size=8, queue_size=64, grammar_seconds=0.5),
        )
        limits = ServiceLimits(
            max_tokens=6, body_bytes=300_000, body_seconds=0.05, request_seconds=1000
        )
        log = AccessLog("text", self._log_lines.append)
        local = {"127.0.0.1", "localhost"}
        services = [
            Service(models, limits, allowed_hosts=local, log=log),
            Service(models, limits, api_key="key", origins=["https://page.example"], log=log),
        ]
        self._apps = [self._noting(service) for service in services]

    def change(self, i: int, rng: Random) -> str:
        """Change a body, another part of a request, or the bytes of one."""
        if i % 4:
            number, which = divmod(i - i // 4 - 1, len(self._bodies))
            path, body = self._bodies[which]
            document, what = body.change(number, rng)
            if isinstance(document, dict) and rng.random() < 0.3:
                fields = [*rng.choice(_BODIES)[1].items(), *rng.choice(_SAMPLING).items()]
                more = dict(rng.sample(fields, rng.choice((1, 1, 2))))
                document, what = document | more, f"{what}; with {more}"
            self.prepare(path, document, rng)
        else:
            mutator = self._requests[i // 4 % len(self._requests)]
            path, request, lines = mutator.document["path"], mutator.document, list[str]()
            if rng.random() < 0.5:
                document, what = mutator.change(i // 4 // len(self._requests), rng)
                request = document if isinstance(document, dict) else {}
            else:
                method = rng.choice((request["method"], rng.choice(_METHODS)))
                request = request | {"method": method}
                lines = rng.choices(_HEADERS, k=rng.choice((1, 1, 2)))
                what = f"{method} with {lines}"
            wants_key = rng.random() < 0.3
            if wants_key and rng.random() < 0.8:
                lines = [*lines, _KEY]
            self._path, self._raw = path, _encode(request, lines, rng)
            self._app = self._apps[wants_key]
        self._leaves = rng.random() < 0.02
        if rng.random() < 0.06:
            self._raw, damage = _damage(self._raw, rng)
            what += f"; {damage}"
        return f"{path}: {what}{', leaves early' if self._leaves else ''}"

    def prepare(self, path: str, body: Any, rng: Random) -> None:
        """Take a body as the case, which one of the servers gets."""
        request = {"method": "POST", "path": path, "headers": _JSON, "body": body}
        wants_key = rng.random() < 0.1
        self._path, self._raw = path, _encode(request, [_KEY] if wants_key else [], rng)
        self._app, self._leaves = self._apps[wants_key], False

    def read(self) -> None:
        """Send the request and check the response; raises TgenError for one of status 400 to
        499."""
        self._failures.clear()
        self._log_lines.clear()
        began = time.process_time()
        response = self._send(self._raw, self._app, leaves=self._leaves)
        seconds = time.process_time() - began
        if self._failures:
            raise self._failures[0]
        try:
            assert seconds < _CPU_SECONDS, f"takes {seconds:.0f} s of CPU time"
            text = response.check()
            assert not any(secret in text for secret in self._secrets), f"tells a path: {text}"
            assert all(map(_LOG_LINE.fullmatch, self._log_lines)), f"in the log: {self._log_lines}"
            self._n += 1
            if self._n % 16 == 1:
                assert self._ask() == self._known, "another text than before"
        except AssertionError as error:  # the end tells findings apart
            raise AssertionError(f"{str(error)[:160]} [{self._path}:{response.status}]") from None
        if response.status >= 400:
            raise TgenError(response.message())

    def _ask(self) -> str:
        """Return the text of a plain request."""
        request = {"method": "POST", "path": "/v1/completions", "headers": _JSON, "body": _PLAIN}
        response = self._send(_encode(request, [], Random(0)), self._apps[0])
        assert response.status == 200, response
        return str(json.loads(response.body)["choices"][0]["text"])

    def _send(self, raw: bytes, app: ASGIApp, *, leaves: bool = False) -> Response:
        return self._loop.run_until_complete(exchange(raw, app, leaves=leaves))

    def _noting(self, app: ASGIApp) -> ASGIApp:
        """Return an application that keeps exceptions instead of raising them."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            except Exception as error:
                self._failures.append(error)

        return call

    def _note_record(self, record: logging.LogRecord) -> bool:
        """Keep the exception of a log record; return True to print a record without one."""
        error = record.exc_info and record.exc_info[1]
        if error:
            self._failures.append(error)
        return not error


def _encode(request: dict[str, Any], lines: list[str], rng: Random) -> bytes:
    """Return a request as it is sent, with more lines in its header."""
    given, body = request.get("headers"), b""
    head = [f"{request.get('method')} {request.get('path')} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in given.items()] if isinstance(given, dict) else []
    names = {line.partition(":")[0] for line in lines}
    head = [line for line in head if line.partition(":")[0] not in names] + lines
    if "body" in request:
        body = dump(request["body"])
        if rng.random() < 0.03:
            body = _nest(body, rng)
    if "content-encoding: gzip" in lines and rng.random() < 0.7:
        body = gzip.compress(body, 1)
        body = rng.choice((body, body, body[:-1], body + b"x", body * 2))
    if "transfer-encoding: chunked" in lines:
        size = rng.choice((1, 7, len(body) or 1))
        parts = [body[i : i + size] for i in range(0, min(len(body), 99 * size), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])
    elif body and "content-length" not in names:
        head.append(f"content-length: {len(body)}")
    lines_sent = "\r\n".join([*head, "", ""])
    encoding = "latin-1" if max(map(ord, lines_sent)) < 256 else "utf-8"
    return lines_sent.encode(encoding, "surrogatepass") + body


def _nest(body: bytes, rng: Random) -> bytes:
    """Replace a value by one that is nested almost as deeply as Python reads."""
    if len(body) > 2000 or not (values := [*_VALUE.finditer(body)]):
        return body
    start, end = rng.choice(values).span()
    before, after = rng.choice(_NESTS)
    depth = rng.choice((rng.randrange(100, 1000), rng.randrange(850, 1000)))
    return body[:start] + before * depth + b"{}" + after * depth + body[end:]


def _damage(raw: bytes, rng: Random) -> tuple[bytes, str]:
    """Insert pieces into the bytes, replace parts of them, or cut them."""
    changes = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(min(len(raw), 600) + 1)
        end = rng.choice((at, at, at + 1, at + rng.randrange(40), len(raw)))
        piece = rng.choice(_PIECES) if rng.random() < 0.9 else b""
        raw = raw[:at] + piece + raw[end:]
        changes.append(f"{piece[:20]!r} for bytes {at} to {end}")
    return raw, "; ".join(changes)
