"""The ASGI application: routes, and what every request must pass first."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tgen.config import CONSTRAINTS
from tgen.errors import TgenError
from tgen.loaded_model import LoadedModel
from tgen.serve import front_page, live_views, llama_cpp, metrics, ollama, page_files, responses
from tgen.serve.access import Access
from tgen.serve.access_log import AccessLog, LogEntry
from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import Job
from tgen.serve.http_error import (
    HttpError,
    bad_request,
    timed_out,
    to_http,
    unavailable,
)
from tgen.serve.http_response import (
    NOTES,
    OpenAIForm,
    TextResponse,
    wait_for_disconnect,
)
from tgen.serve.inspection import VIEWS, InspectionProcess
from tgen.serve.json_body import load_object
from tgen.serve.live_tokens import TokenAnswer, TokensRequest
from tgen.serve.models import ModelSource, ServedModel, ServedModels
from tgen.serve.preparation import PreparedTexts, find_call_form, prepare
from tgen.serve.request_body import read_body
from tgen.serve.text_request import ChatRequest, CompletionRequest, TextRequest, parse

_PREPARING_THREADS = 2
_SLASHES = re.compile("/{2,}")
_SMALL_BODY = 4096  # bytes; larger ones are not parsed in the event loop
_ALWAYS_ANSWERED = ("/health", "/metrics")  # however many requests are open
_SOURCES = "/tgen/sources"  # has parts of the training text
_Result = TypeVar("_Result")
# From a body and the id of the default model to the request and the form of its answer.
_Reader = Callable[[bytes, str], tuple[TextRequest, OpenAIForm]]
# From a model, its id and the other fields of a body to the response.
_Description = Callable[[LoadedModel, str, dict[str, Any]], dict[str, Any]]
_DESCRIPTIONS: dict[str, _Description] = {
    "/api/show": ollama.show,
    "/tokenize": llama_cpp.tokenize,
    "/detokenize": llama_cpp.detokenize,
    "/apply-template": llama_cpp.apply_template,
    "/tgen/model": live_views.model_facts,
    "/tgen/tokens": live_views.tokens,
    "/tgen/next": live_views.next_token,
    "/tgen/cache": live_views.cache_times,
    _SOURCES: live_views.sources,
}
_EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings", "/embedding", "/embeddings")


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """The limits of one request."""

    max_tokens: int | None = None  # new tokens per text; None: the context length
    body_bytes: int
    body_seconds: float  # until the whole body is there
    request_seconds: float  # until the last token, in the queue and in the batch
    open_requests: int = 512  # of all clients, at a time
    strict: bool = False  # more new tokens than allowed or than fit are an error


class Service:
    """The application. It checks host and key, then Starlette routes the request."""

    def __init__(
        self,
        models: ServedModels,
        limits: ServiceLimits,
        *,
        api_key: str | None = None,
        allowed_hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
        log: AccessLog | None = None,
        shows_sources: bool = False,
    ) -> None:
        """`api_key` and `allowed_hosts` as in `Access`; web pages of `origins` may use the server,
        "*" means all."""
        self._models, self._limits, self._log = models, limits, log
        self._shows_sources = shows_sources
        self._created = int(time.time())
        self._metrics = metrics.Metrics()
        self._preparers = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="prepare")
        self._inspection = InspectionProcess()
        self._draining = asyncio.Event()
        self._n_open = 0  # requests that are being answered
        self._access = Access(api_key, allowed_hosts)
        self._app: ASGIApp = self._answer
        if origins:
            self._app = CORSMiddleware(
                self._answer,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After", NOTES],
                allow_private_network=True,  # from pages of the internet to this machine
            )
        self._router = Starlette(
            routes=self._make_routes(),
            exception_handlers={
                TgenError: _answer_error,
                HTTPException: _answer_http_exception,
                ClientDisconnect: _answer_nobody,
                RecursionError: _answer_deep_body,
                Exception: _answer_error,
            },
        )
        self._router.router.redirect_slashes = False

    def _make_routes(self) -> list[Route]:
        return [
            Route("/", self._front_page),
            Route(f"{page_files.PREFIX}{{name}}", page_files.get_page),
            Route("/health", self._health),
            Route("/metrics", self._get_metrics),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._get_model),
            Route("/api/version", _get_ollama_version),
            Route("/api/tags", self._list_ollama_models),
            Route("/api/ps", self._list_loaded_models),
            Route("/props", partial(self._describe, describe=llama_cpp.properties)),
            *(
                Route(path, partial(self._create, read=read), methods=["POST"])
                for path, read in _READERS.items()
            ),
            *(
                Route(path, partial(self._describe, describe=describe), methods=["POST"])
                for path, describe in _DESCRIPTIONS.items()
            ),
            *(
                Route(f"/tgen/{view}", partial(self._inspect, view=view), methods=["POST"])
                for view in VIEWS
            ),
            *(Route(path, _refuse_embeddings, methods=["POST"]) for path in _EMBEDDINGS),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and log it."""

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                self._metrics.responses[message["status"]] += 1
            await send(message)

        scope["path"] = _plain_path(scope["path"])
        entry = scope["log_entry"] = LogEntry(scope)
        self._n_open += 1
        try:
            await self._app(scope, receive, count_and_send)
        finally:
            self._n_open -= 1
            if self._log is not None:
                self._log.add(entry)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._access.check(scope, needs_key=not page_files.is_static(scope))
            if scope["path"] not in _ALWAYS_ANSWERED:
                self._models.check_open()
                if self._n_open > self._limits.open_requests:
                    raise unavailable("too many requests at a time", "overloaded")
        except HttpError as error:
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._router(scope, receive, send)

    def drain(self) -> None:
        """Refuse new requests, and those that wait for their model or their grammar."""
        self._models.drain()
        self._draining.set()

    def close(self) -> None:
        """Prepare no more requests, and end the inspection."""
        self._inspection.close()
        self._preparers.shutdown(wait=False, cancel_futures=True)

    async def _health(self, _: Request) -> Response:
        self._models.check_open()
        return JSONResponse({"status": "ok"})

    async def _front_page(self, request: Request) -> Response:
        if page_files.wants_page(request.scope):
            return await page_files.get_page(request)
        return PlainTextResponse(front_page.render(str(request.base_url), [*self._models.sources]))

    async def _get_metrics(self, _: Request) -> Response:
        n_running, n_waiting = self._models.n_running, self._models.n_waiting
        text = self._metrics.render(n_running=n_running, n_waiting=n_waiting)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def _list_models(self, _: Request) -> Response:
        models = [self._describe_model(source) for source in self._models.sources.values()]
        return JSONResponse({"object": "list", "data": models})

    async def _get_model(self, request: Request) -> Response:
        return JSONResponse(self._describe_model(self._models.find(request.path_params["name"])))

    def _describe_model(self, source: ModelSource) -> dict[str, Any]:
        model = {"id": source.name, "object": "model", "created": self._created}
        model |= {"owned_by": "tgen", "max_model_len": source.context_length}
        return model | ({"parent": source.base} if source.base else {})

    async def _list_ollama_models(self, _: Request) -> Response:
        sizes = {source.name: source.n_bytes for source in self._models.sources.values()}
        return JSONResponse(ollama.list_models(sizes, self._created))

    async def _list_loaded_models(self, _: Request) -> Response:
        loaded = {served.source.name: served.model for served in self._models.loaded}
        return JSONResponse(ollama.list_loaded(loaded))

    async def _describe(self, request: Request, describe: _Description) -> Response:
        """Answer a question about a model or a text, for which no text is generated."""
        if request.url.path == _SOURCES and not self._shows_sources:
            message = (
                "passages of the training text are only shown on this machine, or with --sources"
            )
            raise HttpError(403, message, code="sources_not_shown")
        served, values = await self._open_named(request)
        work = self._run(describe, served.model, served.source.name, values)
        return JSONResponse(await self._while_open(request, work))

    async def _inspect(self, request: Request, view: str) -> Response:
        """Answer with a view of a text's attention."""
        served, values = await self._open_named(request)
        work = self._inspection.inspect(view, served.model, values, lambda: served.n_texts)
        return JSONResponse(await self._while_open(request, work))

    async def _open_named(self, request: Request) -> tuple[ServedModel, dict[str, Any]]:
        """Return the model that a request names, and the other fields of its body or query."""
        if request.method == "POST":
            values = await self._run(load_object, await self._read_body(request))
        else:
            values = dict(request.query_params)
        name = values.pop("model", values.pop("name", self._models.default))
        if not isinstance(name, str):
            raise bad_request("model: expected a string", "model")
        return await self._open_model(request, name), values

    async def _create(self, request: Request, read: _Reader) -> Response:
        """Put the texts of a request into the queue; the response waits for them."""
        body = await self._read_body(request)
        if len(body) < _SMALL_BODY:
            text_request, form = read(body, self._models.default)
        else:
            text_request, form = await self._run(read, body, self._models.default)
        n, limit = text_request.n_texts, self._models.queue_size
        if n > limit:
            message = f"n: too many texts over all prompts (got {n:,}, limit {limit:,})"
            raise bad_request(message, "n")
        served = await self._open_model(request, text_request.model)
        engine, model = served.engine, served.model
        engine.reserve(n)
        try:
            prepared = await self._prepare(request, served, text_request)
        except BaseException:
            engine.release(n)
            raise
        token_bytes, name = model.vocabulary.bytes_of, served.source.name
        kind = TokenAnswer if isinstance(text_request, TokensRequest) else Answer
        answer = kind(text_request, prepared, name, served.fingerprint, token_bytes)
        job = Job(
            prepared.requests,
            stream=text_request.stream,
            n_top=text_request.n_top_of_prompt,
            names=text_request.names,
        )
        engine.submit(job)
        self._metrics.texts += n
        entry = request.scope["log_entry"]
        entry.model, entry.seed, entry.answer = name, prepared.seed, answer
        return TextResponse(
            engine,
            self._metrics,
            job,
            answer,
            form,
            timeout=self._limits.request_seconds,
            notes=prepared.notes,
        )

    async def _prepare(
        self, request: Request, served: ServedModel, text_request: TextRequest
    ) -> PreparedTexts:
        """Compile the constraint in its process, then prepare the texts in a worker thread; raises
        HttpError."""
        model, limits = served.model, self._limits
        sampling, calls = text_request.sampling, None
        try:
            if isinstance(text_request, ChatRequest) and text_request.calls_tools:
                calls = await self._run(find_call_form, model, text_request)
                sampling = calls.constraint
            if any(sampling.get(name) for name in CONSTRAINTS):
                await self._while_open(request, served.grammars.check(sampling))
            max_tokens = limits.max_tokens or model.engine.context_length
            work = partial(prepare, strict=limits.strict, calls=calls)
            return await self._run(work, model, text_request, max_tokens)
        except TgenError as error:
            raise to_http(calls.name_tool(error) if calls else error, text_request.names) from None

    def _run(self, work: Callable[..., _Result], *arguments: Any) -> asyncio.Future[_Result]:
        """Do work in one of the threads that prepare."""
        return asyncio.get_running_loop().run_in_executor(self._preparers, work, *arguments)

    async def _open_model(self, request: Request, name: str) -> ServedModel:
        """Return a model, loaded if necessary; it stays so until the next await, and while it has
        texts."""
        seconds = self._limits.request_seconds
        try:
            with self._models.visit(name) as visit:
                if not visit.ready.done():
                    async with asyncio.timeout(seconds):
                        await self._while_open(request, visit.ready)
                return self._models.get(visit.name)
        except TimeoutError:
            raise timed_out(f"the model was not loaded within {seconds:g} seconds") from None

    async def _while_open(self, request: Request, work: Awaitable[_Result]) -> _Result:
        """Return the result of work, which is cancelled if the client leaves or the server drains;
        then raise ClientDisconnect or HttpError."""
        task = asyncio.ensure_future(work)
        waits = (wait_for_disconnect(request.receive), self._draining.wait())
        tasks: list[asyncio.Future[Any]] = [task, *map(asyncio.create_task, waits)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._models.check_open()
                raise ClientDisconnect
            return task.result()
        finally:
            for one in tasks:
                one.cancel()

    async def _read_body(self, request: Request) -> bytes:
        """Return a body of JSON, which may be neither larger nor slower than the limits."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers ask before a page sends JSON to another server, but not for other types. Programs
        # have no Origin, and some do not name the type.
        if content_type != "application/json" and "origin" in request.headers:
            raise HttpError(415, "a request of a web page needs the Content-Type application/json")
        limits = self._limits
        return await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds)


_READERS: dict[str, _Reader] = {
    "/v1/completions": lambda body, model: (parse(body, CompletionRequest, model), OpenAIForm()),
    "/v1/chat/completions": lambda body, model: (parse(body, ChatRequest, model), OpenAIForm()),
    "/v1/responses": responses.read,
    "/tgen/generate": lambda body, model: (parse(body, TokensRequest, model), OpenAIForm()),
    "/api/generate": ollama.read_generate,
    "/api/chat": ollama.read_chat,
}


def _plain_path(path: str) -> str:
    """Return the path of a request target, which may have the server's address before it, a slash
    after it, and several slashes where the client's address of the server ends."""
    if path[:8].lower().startswith(("http://", "https://")):
        path = "/" + path.split("/", 3)[3] if path.count("/") > 2 else "/"
    return _SLASHES.sub("/", path).rstrip("/") or "/"


async def _get_ollama_version(_: Request) -> Response:
    return JSONResponse({"version": ollama.VERSION})


async def _refuse_embeddings(request: Request) -> Response:
    message = f"{request.url.path} is not supported: this server only generates texts"
    raise HttpError(404, message, code="unsupported_endpoint")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer with an expected error, or with 500 for a bug, which uvicorn logs."""
    return to_http(error).response(request.url.path)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail.lower()}"
    if error.status_code in (404, 405):
        message += "; GET / lists what this server has"
    return HttpError(error.status_code, message, headers=error.headers).response(request.url.path)


async def _answer_nobody(*_: object) -> Response:
    return Response(status_code=499)  # the client has left


async def _answer_deep_body(request: Request, _: Exception) -> Response:
    return bad_request("the body is nested too deeply").response(request.url.path)
