"""The ASGI application: routes, and what every request must pass first."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tgen.config import CONSTRAINTS
from tgen.errors import TgenError
from tgen.loaded_model import LoadedModel
from tgen.serve import metrics
from tgen.serve.access import Access
from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import EngineThread, Job
from tgen.serve.grammar_check import GrammarCheck
from tgen.serve.http_error import (
    HttpError,
    bad_request,
    internal_error,
    model_not_found,
    to_http,
    unavailable,
)
from tgen.serve.preparation import prepare
from tgen.serve.text_request import ChatRequest, CompletionRequest, TextRequest, parse
from tgen.serve.text_response import AnswerForm, OpenAIForm, TextResponse, wait_for_disconnect

_PREPARING_THREADS = 2
_SMALL_BODY = 4096  # bytes; larger ones are not parsed in the event loop
_MAX_OPEN = 512  # requests
# From a body and the id of the model to the request and the form of its answer.
_Reader = Callable[[bytes, str], tuple[TextRequest, AnswerForm]]


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What one request may ask for."""

    max_tokens: int  # new tokens per text
    body_bytes: int
    body_seconds: float  # until the whole body is there
    request_seconds: float  # until the last token, in the queue and in the batch
    grammar_seconds: float = 2.0  # of CPU time, to compile a constraint


class Service:
    """The application. It checks host and key, then Starlette routes the request."""

    def __init__(
        self,
        model: LoadedModel,
        engine: EngineThread,
        limits: ServiceLimits,
        *,
        name: str,
        fingerprint: str,
        api_key: str | None = None,
        allowed_hosts: Collection[str] | None = None,
    ) -> None:
        """`api_key` and `allowed_hosts` as in `Access`."""
        self._model, self._engine, self._limits = model, engine, limits
        self._name, self._fingerprint, self._created = name, fingerprint, int(time.time())
        self._metrics = metrics.Metrics()
        self._preparers = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="prepare")
        self._grammars = GrammarCheck(model.vocabulary, limits.grammar_seconds)
        self._draining = asyncio.Event()
        self._n_open = 0  # requests that are being answered
        self._access = Access(api_key, allowed_hosts)
        self._router = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._get_metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._get_model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={
                TgenError: _answer_tgen_error,
                HTTPException: _answer_http_exception,
                ClientDisconnect: _answer_nobody,
                Exception: _answer_bug,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses[message["status"]] += 1
            await send(message)

        scope["path"] = _plain_path(scope["path"])
        self._n_open += 1
        try:
            self._access.check(scope)
            if scope["path"].startswith("/v1/"):
                self._engine.check_open()
                if self._n_open > _MAX_OPEN:
                    raise unavailable("too many requests at a time", "overloaded")
        except HttpError as error:
            await error.response()(scope, receive, count_and_send)
        else:
            await self._router(scope, receive, count_and_send)
        finally:
            self._n_open -= 1

    def drain(self) -> None:
        """Refuse new requests, and those that wait for their grammar."""
        self._engine.drain()
        self._draining.set()

    def close(self) -> None:
        """Prepare no more requests."""
        self._grammars.close()
        self._preparers.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: Request) -> Response:
        del request
        self._engine.check_open()
        return JSONResponse({"status": "ok"})

    async def _get_metrics(self, request: Request) -> Response:
        del request
        n_running, n_waiting = self._engine.n_running, self._engine.n_waiting
        text = self._metrics.render(n_running=n_running, n_waiting=n_waiting)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def _list_models(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def _get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            raise model_not_found(name, self._name)
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        length = self._model.engine.context_length
        model = {"id": self._name, "object": "model", "created": self._created}
        return model | {"owned_by": "tgen", "max_model_len": length}

    async def _completions(self, request: Request) -> Response:
        return await self._create(request, _read_completion)

    async def _chat(self, request: Request) -> Response:
        return await self._create(request, _read_chat)

    async def _create(self, request: Request, read: _Reader) -> Response:
        """Put the texts of a request into the queue; the response waits for them."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise HttpError(415, "the Content-Type is not application/json")
        body = await self._read_body(request)
        run = asyncio.get_running_loop().run_in_executor
        try:
            if len(body) < _SMALL_BODY:
                text_request, form = read(body, self._name)
            else:
                text_request, form = await run(self._preparers, read, body, self._name)
        except RecursionError:
            raise bad_request("the body is nested too deeply") from None
        n, limits = text_request.n_texts, self._limits
        if n > self._engine.queue_size:
            limit = self._engine.queue_size
            message = f"n: too many texts over all prompts (got {n:,}, limit {limit:,})"
            raise bad_request(message, "n")
        self._engine.reserve(n)
        try:
            sampling = text_request.sampling
            if any(sampling.get(name) for name in CONSTRAINTS):
                await self._while_open(request, self._grammars.check(sampling))
            prepared = await run(
                self._preparers, prepare, self._model, text_request, limits.max_tokens
            )
        except BaseException:
            self._engine.release(n)
            raise
        token_bytes = self._model.vocabulary.bytes_of
        answer = Answer(text_request, prepared, self._name, self._fingerprint, token_bytes)
        job = Job(prepared.requests, stream=text_request.stream)
        self._engine.submit(job)
        self._metrics.texts += n
        return TextResponse(
            self._engine,
            self._metrics,
            job,
            answer,
            form,
            stream=text_request.stream,
            timeout=limits.request_seconds,
        )

    async def _while_open(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work, which is cancelled if the client leaves or the server drains; then raise
        ClientDisconnect or HttpError."""
        waits = (work, wait_for_disconnect(request.receive), self._draining.wait())
        tasks = [asyncio.create_task(one) for one in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                self._engine.check_open()
                raise ClientDisconnect
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    async def _read_body(self, request: Request) -> bytes:
        """Return the body, which may be neither larger nor slower than the limits."""
        limit, seconds = self._limits.body_bytes, self._limits.body_seconds
        too_large = HttpError(413, f"the body is too large (limit {limit:,} bytes)")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            message = f"the body did not arrive within {seconds:g} seconds"
            raise HttpError(408, message, headers={"Connection": "close"}) from None
        return bytes(body)


def _read_completion(body: bytes, model: str) -> tuple[TextRequest, AnswerForm]:
    return parse(body, CompletionRequest, model), OpenAIForm()


def _read_chat(body: bytes, model: str) -> tuple[TextRequest, AnswerForm]:
    return parse(body, ChatRequest, model), OpenAIForm()


def _plain_path(path: str) -> str:
    """Return the path of a request target, which may have the server's address before it and a
    slash after it."""
    if path.startswith(("http://", "https://")):
        path = "/" + path.split("/", 3)[3] if path.count("/") > 2 else "/"
    return path.rstrip("/") or "/"


async def _answer_tgen_error(request: Request, error: Exception) -> Response:
    del request
    return to_http(error).response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail.lower()}"
    return HttpError(error.status_code, message, headers=error.headers).response()


async def _answer_nobody(request: Request, error: Exception) -> Response:
    del request, error  # the client has left
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    del request, error  # Starlette raises it again, and uvicorn logs it
    return internal_error().response()
