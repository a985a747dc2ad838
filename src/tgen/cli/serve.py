"""`tgen serve`: OpenAI's HTTP API in front of a model."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tgen.cli import console
from tgen.cli.model_loading import find_draft_model, load_draft_model, load_model, short_name
from tgen.cli.options import (
    draft_model_option,
    engine_options,
    make_command,
    model_option,
    parse_size,
    quiet_option,
)
from tgen.config import EngineOptions
from tgen.config.option import option
from tgen.errors import TgenError, UsageError

if TYPE_CHECKING:
    from tgen.loaded_model import LoadedModel
    from tgen.serve.models import ModelSource

KEY_VARIABLE = "TGEN_API_KEY"
_LIMITS, _SPEED = "Limits", "Performance"
_limit, _speed = (partial(option, panel=panel) for panel in (_LIMITS, _SPEED))
_BODY_SECONDS = 10.0
_STDERR = 2
_MEMORY_SHARE = 0.8  # of the free memory, for weights
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+", re.ASCII)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers leave them out


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `tgen serve`."""

    model: list[str] = model_option(
        "Model path or name, as in tgen generate; with NAME=, its name in the API. Repeatable: "
        "several models are loaded when they are needed.",
        default_factory=list,
        metavar="[NAME=]MODEL",
    )
    adapter: list[str] = option(
        default_factory=list,
        help_text="LoRA adapter in PEFT's format, served as a model. Its base is the only --model, "
        "or the one that the adapter names. Repeatable.",
        flags="--adapter",
        metavar="[NAME=]DIR",
    )
    host: str = option(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 accepts connections from other machines.",
        "--host",
        metavar="ADDRESS",
    )
    port: int = option(
        8000, "Port to listen on; 0 chooses a free one.", "--port", low=0, high=65535
    )
    open_page: bool = option(False, "Open the live page in a browser.", "--open")
    api_key: str | None = option(
        None,
        "Key that requests must send, except for /health and the files of the live page.",
        "--api-key",
        metavar="KEY",
        shown_default=f"the environment variable {KEY_VARIABLE}, else none",
    )
    cors: list[str] = option(
        default_factory=list,
        help_text="Origin whose web pages may use the server, such as https://example.com, or * "
        "for all, which needs a key. Repeatable.",
        flags="--cors",
        metavar="ORIGIN",
    )
    sources: bool = option(
        False,
        "Show passages of the training text even if other machines can reach the server.",
        "--sources",
    )
    log: Literal["text", "json", "off"] | None = option(
        None,
        "Access log on stderr: one line per request, without texts.",
        "--log",
        shown_default="text; off with --quiet",
    )
    quiet: bool = quiet_option(panel="")
    max_tokens: int | None = _limit(
        None,
        "Maximum number of new tokens per text.",
        "--max-tokens",
        shown_default="the context length",
        low=1,
    )
    strict: bool = _limit(
        False,
        "Reject requests for more new tokens than fit, instead of ending their texts early.",
        "--strict",
    )
    queue_size: int = _limit(
        128, "Number of texts that may wait; further requests get status 429.", "--queue", low=1
    )
    max_open: int = _limit(
        512,
        "Number of requests that may be open; further ones get status 503, except /health and "
        "/metrics.",
        "--max-open",
        low=1,
        high=100_000,
    )
    max_body: str = _limit("1MB", "Maximum size of a request.", "--max-body", metavar="SIZE")
    model_memory: str | None = _limit(
        None,
        "Memory for the weights of several models; the least recently used are unloaded.",
        "--model-memory",
        metavar="SIZE",
        shown_default="80% of the free RAM, or of the GPU's free memory",
    )
    request_timeout: float = _limit(
        600.0,
        "Maximum time of a request in seconds, including its time in the queue.",
        "--request-timeout",
        low=0.001,
        high=86_400,
    )
    grammar_timeout: float = _limit(
        2.0,
        "CPU seconds that compiling a request's schema or grammar may take.",
        "--grammar-timeout",
        low=0.001,
        high=86_400,
    )
    drain_timeout: float = _limit(
        30.0,
        "Seconds for running texts to end after SIGTERM or Ctrl-C.",
        "--drain-timeout",
        low=0,
        high=86_400,
    )
    batch_size: int = _speed(
        16, "Number of texts that are generated together.", "--batch-size", low=1, high=1024
    )
    draft_model: str | None = draft_model_option()
    engine: EngineOptions = engine_options()

    def __post_init__(self) -> None:
        _ = self.body_bytes, self.model_memory and self.memory_bytes
        if self.key == "":
            message = "--api-key: the key is empty"
            raise UsageError(message, f"pass a key, or unset {KEY_VARIABLE}")
        if self.key is not None and not self.key.isprintable():
            message = "--api-key: the key has characters that are not printable"
            raise UsageError(message, f"set --api-key or {KEY_VARIABLE} to a single line of text")
        if "*" in self.origins and self.key is None:
            message = "--cors '*' without a key lets every web page use the server"
            raise UsageError(message, f"set --api-key or {KEY_VARIABLE}, or name the origins")

    @property
    def body_bytes(self) -> int:
        """Maximum size of a request in bytes."""
        return parse_size("--max-body", self.max_body)

    @property
    def memory_bytes(self) -> int | None:
        """Memory for weights in bytes, of the device that has them; None if it is unknown."""
        if self.model_memory is not None:
            return parse_size("--model-memory", self.model_memory)
        from tgen.engine.choose_engine import runs_on_cpu
        from tgen.machine.memory import free_ram

        if self.engine.kind == "kernels" or runs_on_cpu(self.engine.device):
            free = free_ram()
        else:
            from tgen.machine.device import choose_device, free_bytes

            free = free_bytes(choose_device(self.engine.device))
        return None if free is None else int(_MEMORY_SHARE * free)

    @property
    def origins(self) -> list[str]:
        """The origins of web pages, as browsers send them."""
        origins = []
        for text in self.cors:
            origin = text.strip().lower()
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                hint = "set --cors to scheme, host and port alone, such as https://example.com"
                raise UsageError(f"--cors: invalid value {text!r}", hint)
            scheme = origin.partition(":")[0]
            origins.append(origin.removesuffix(_DEFAULT_PORTS.get(scheme, " ")))
        return origins

    @property
    def key(self) -> str | None:
        """The API key, from the command line or the environment; None without one.

        White space around it is removed: files with secrets often end with a newline, which no
        header can have.
        """
        key = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)
        return None if key is None else key.strip()


def serve(options: ServeOptions) -> None:
    """Serve models over OpenAI's, Ollama's and llama.cpp's HTTP APIs.

    In a browser, / is a live page: it writes with the model and shows how each token was chosen.
    For other clients, GET / lists the paths; /health and /metrics are for supervision.
    The texts of a model are generated together; each depends only on its own request and seed.
    Sampling defaults are those of tgen generate.

    SIGTERM or Ctrl-C ends the server: running texts may finish within --drain-timeout; waiting and
    new requests get status 503. A second signal ends it at once. docs/serve.md lists the fields of
    a request and has examples.
    """
    run_server(options)


def run_server(options: ServeOptions, *, text: bytes = b"") -> None:
    """Serve until a signal ends the server; `text` is what the page starts with."""
    try:
        from tgen.serve import server
        from tgen.serve.access_log import AccessLog
        from tgen.serve.app import ServiceLimits
        from tgen.serve.models import ModelSettings
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("pydantic", "starlette", "uvicorn"):
            raise
        message = f"tgen serve needs the package {package}"
        raise TgenError(message, "pip install 'tgen-lm[serve]'") from None
    sources = find_sources(options.model, options.adapter)
    draft_path = find_draft_model(options.draft_model)
    sock = server.listen(options.host, options.port)
    settings = server.ServerSettings(
        models=ModelSettings(
            batch_size=options.batch_size,
            queue_size=options.queue_size,
            grammar_seconds=options.grammar_timeout,
            memory_bytes=options.memory_bytes,
        ),
        drain_seconds=options.drain_timeout,
        api_key=options.key,
        origins=options.origins,
        shows_sources=options.sources,
        limits=ServiceLimits(
            max_tokens=options.max_tokens,
            body_bytes=options.body_bytes,
            body_seconds=_BODY_SECONDS,
            request_seconds=options.request_timeout,
            open_requests=options.max_open,
            strict=options.strict,
        ),
    )

    load_draft = cache(load_draft_model)  # for all models of this server

    def load(source: "ModelSource") -> "LoadedModel":
        model = load_model(source.path, options.engine, adapter=source.adapter)
        try:
            if draft_path is not None:
                model.draft_with(load_draft(draft_path, options.engine))
        except UsageError as error:  # other models of this server may have its tokens
            if len(sources) == 1:
                raise
            console.print_status(f"warning: {source.name} has no drafts: {error.message}")
        return model

    def print_addresses() -> None:
        if options.key is None and not server.is_loopback(sock):
            message = (
                "warning: everyone who can reach this address can use the model "
                f"(set --api-key or {KEY_VARIABLE})"
            )
            console.print_status(message)
        for source in sources:
            where = f"{source.adapter or source.path} · serving {source.name}"
            console.print_status(f"{where} on {server.url(sock)}")
        if options.open_page:
            _open_page(server.url(sock), options.key, text)

    log = AccessLog(options.log or ("off" if options.quiet else "text"), partial(os.write, _STDERR))
    with sock, log.capture_stderr():
        try:
            is_forced = server.serve(sources, load, sock, settings, log, print_addresses)
        except TgenError as error:
            console.print_error(error.message, error.hint)
            raise SystemExit(error.exit_status) from None
        finally:
            log.close()
    if is_forced:
        os._exit(0)


def find_sources(models: Sequence[str], adapters: Sequence[str]) -> list["ModelSource"]:
    """Find what `--model` and `--adapter` name, in their order.

    Raises UsageError for a name that is given twice, ModelError for a model that does not exist and
    for an adapter whose pairs of matrices do not fit its base.
    """
    from tgen.checkpoint.model_dir import describe
    from tgen.checkpoint.model_lookup import find_model
    from tgen.checkpoint.stored_models import is_adapter
    from tgen.lora import adapter as adapters_of
    from tgen.lora import adapter_base
    from tgen.serve.models import describe_source

    found: list[tuple[str, Path, Path | None]] = []  # name, model or base, adapter

    def add_model(name: str, model: str | None) -> None:
        path = find_model(model).path
        is_alone = not is_adapter(path)
        base = path if is_alone else adapter_base.find_base(path)
        found.append((name or short_name(model, path), base, None if is_alone else path))

    if not models and not adapters:
        add_model("", None)
    for text in models:
        add_model(*_split_name("--model", text))
    for name, directory in (_split_name("--adapter", text) for text in adapters):
        adapter = adapters_of.find_adapter(directory)
        base = found[0][1] if len(models) == 1 else adapter_base.find_base(adapter)
        if not any(other is None and path.samefile(base) for _, path, other in found):
            if models:
                message = f"--adapter {directory}: its base {str(base)!r} is not served"
                raise UsageError(message, f"add --model {shlex.quote(str(base))}")
            found.append((short_name(None, base), base, None))
        found.append((name or short_name(directory, adapter), base, adapter))
    names = [name for name, *_ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        message = f"two models have the name {twice[0]!r}"
        raise UsageError(message, "name one of them: --model NAME=MODEL or --adapter NAME=DIR")
    bases = {name: path for name, path, adapter in found if adapter is None}
    sources = []
    for name, path, its_adapter in found:
        if its_adapter is not None:
            adapters_of.read(its_adapter, describe(path)[0], model=path)
        same = (one for one in bases if its_adapter and bases[one].samefile(path))
        sources.append(describe_source(name, path, its_adapter, next(same, None)))
    return sources


def _split_name(flag: str, text: str) -> tuple[str, str]:
    """Return the name and the rest of NAME=REST; no name for a path, which may have a "=", too."""
    name, equals, rest = text.partition("=")
    if not equals or os.path.exists(text):
        return "", text
    if not name.strip() or not name.isprintable() or not rest:
        raise UsageError(f"{flag}: invalid value {text!r}", f"use {flag} NAME=DIRECTORY")
    return name.strip(), rest


def _open_page(url: str, key: str | None, text: bytes) -> None:
    """Open the live page; key and text are in the fragment, which browsers do not send."""
    import threading
    import webbrowser
    from urllib.parse import quote, urlencode

    values = {"key": (key or "").encode(), "text": text}
    fragment = urlencode({name: value for name, value in values.items() if value}, quote_via=quote)
    address = f"{url}/#{fragment}" if fragment else url
    # Browsers for terminals return when they end.
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


command = make_command(serve, ServeOptions)
