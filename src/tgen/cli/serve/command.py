"""`tgen serve`: OpenAI's HTTP API in front of a model."""

from pathlib import Path

from tgen.cli import console
from tgen.cli.model_loading import load_model
from tgen.cli.options import make_command
from tgen.cli.serve.options import KEY_VARIABLE, PANELS, ServeOptions
from tgen.errors import TgenError

_BODY_SECONDS = 10.0


def serve(options: ServeOptions) -> None:
    """Serve a model with OpenAI's HTTP API.

    Paths: /v1/models, /v1/completions, /v1/chat/completions, /health, and /metrics for Prometheus.
    Requests are generated together, and a text depends on its own seed only. Sampling defaults are
    those of tgen generate.

    SIGTERM or Ctrl-C ends the server: running texts are finished within --drain-timeout, new
    requests get status 503. A second signal ends it at once. docs/serve.md lists the fields of a
    request and has examples.
    """
    try:
        from tgen.serve import server
        from tgen.serve.service import ServiceLimits
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        message = f"tgen serve needs the package {package}"
        raise TgenError(message, "pip install 'tgen-lm[serve]'") from None
    from tgen.checkpoint.model_lookup import find_model

    quiet = options.quiet
    path = find_model(options.model).path
    sock = server.listen(options.host, options.port)
    try:
        model = load_model(
            path,
            device=options.device,
            threads=options.threads,
            dtype=options.dtype,
            cache_dtype=options.cache_dtype,
            quiet=quiet,
        )
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
