"""`tgen serve`: OpenAI's HTTP API in front of a model."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tgen.cli import console
from tgen.cli.model_loading import load_model
from tgen.cli.options import engine_options, make_command, model_option, parse_size, quiet_option
from tgen.config import EngineOptions
from tgen.config.option import option
from tgen.errors import TgenError, UsageError

KEY_VARIABLE = "TGEN_API_KEY"
_LIMITS, _SPEED = "Limits", "Performance"
_limit, _speed = (partial(option, panel=panel) for panel in (_LIMITS, _SPEED))
PANELS = (_LIMITS, _SPEED)
_BODY_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `tgen serve`."""

    model: str | None = model_option()
    host: str = option(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 accepts connections from other machines.",
        "--host",
        metavar="ADDRESS",
    )
    port: int = option(
        8000, "Port to listen on; 0 chooses a free one.", "--port", low=0, high=65535
    )
    api_key: str | None = option(
        None,
        "Key that every request but /health must send.",
        "--api-key",
        metavar="KEY",
        shown_default=f"the environment variable {KEY_VARIABLE}, else none",
    )
    quiet: bool = quiet_option(panel="")
    max_tokens: int | None = _limit(
        None,
        "Maximum number of new tokens per text.",
        "--max-tokens",
        shown_default="the context length",
        low=1,
    )
    queue_size: int = _limit(
        128, "Number of texts that may wait; further requests get status 429.", "--queue", low=1
    )
    max_body: str = _limit("1MB", "Maximum size of a request.", "--max-body", metavar="SIZE")
    request_timeout: float = _limit(
        600.0,
        "Maximum time of a request in seconds, including its time in the queue.",
        "--request-timeout",
        low=0.001,
        high=86_400,
    )
    grammar_timeout: float = _limit(
        2.0,
        "CPU seconds that compiling a request's schema may take.",
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
    engine: EngineOptions = engine_options()

    def __post_init__(self) -> None:
        _ = self.body_bytes
        if self.key == "":
            message = "--api-key: the key is empty"
            raise UsageError(message, f"pass a key, or unset {KEY_VARIABLE}")

    @property
    def body_bytes(self) -> int:
        """Maximum size of a request in bytes."""
        return parse_size("--max-body", self.max_body)

    @property
    def key(self) -> str | None:
        """The API key, from the command line or the environment; None without one.

        White space around it is removed: files with secrets often end with a newline, which no
        header can have.
        """
        key = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)
        return None if key is None else key.strip()


def serve(options: ServeOptions) -> None:
    """Serve a model with OpenAI's HTTP API.

    Paths: /v1/models, /v1/completions, /v1/chat/completions, /health, and /metrics for Prometheus.
    The texts of all requests are generated together; each depends only on its own request and seed.
    Sampling defaults are those of tgen generate.

    SIGTERM or Ctrl-C ends the server: running texts may finish within --drain-timeout; waiting and
    new requests get status 503. A second signal ends it at once. docs/serve.md lists the fields of
    a request and has examples.
    """
    try:
        from tgen.serve import server
        from tgen.serve.app import ServiceLimits
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("pydantic", "starlette", "uvicorn"):
            raise
        message = f"tgen serve needs the package {package}"
        raise TgenError(message, "pip install 'tgen-lm[serve]'") from None
    from tgen.checkpoint.model_lookup import find_model

    quiet = options.quiet
    path = find_model(options.model).path
    sock = server.listen(options.host, options.port)
    try:
        model = load_model(path, options.engine, quiet=quiet)
        server.warm_up(model)
        settings = server.ServerSettings(
            name=_model_name(options.model, path),
            batch_size=options.batch_size,
            queue_size=options.queue_size,
            drain_seconds=options.drain_timeout,
            api_key=options.key,
            limits=ServiceLimits(
                max_tokens=options.max_tokens or model.engine.context_length,
                body_bytes=options.body_bytes,
                body_seconds=_BODY_SECONDS,
                request_seconds=options.request_timeout,
                grammar_seconds=options.grammar_timeout,
            ),
        )
        if options.key is None and not server.is_loopback(sock):
            message = (
                "warning: everyone who can reach this address can use the model "
                f"(set --api-key or {KEY_VARIABLE})"
            )
            console.print_status(message, quiet=quiet)
        url = server.url(sock)
        console.print_status(f"{path} · serving {settings.name} on {url}", quiet=quiet)
        server.serve(model, sock, settings)
    finally:
        sock.close()


def _model_name(name: str | None, path: Path) -> str:
    """Return the model's id in the API: its name, without directories."""
    # A cached model's own directory has a hash for a name.
    last = Path(name).name if name else ""
    return (last or path.resolve().name).removesuffix(".gguf")


command = make_command(serve, ServeOptions, PANELS)
