"""The options of `tgen serve`."""

import os
from dataclasses import dataclass
from functools import partial

from tgen.cli.options import (
    Device,
    cache_dtype_option,
    device_option,
    dtype_option,
    model_option,
    parse_size,
    quiet_option,
    threads_option,
)
from tgen.config import CacheDtype, StoredAs
from tgen.config.option import check_ranges, option
from tgen.errors import UsageError

KEY_VARIABLE = "TGEN_API_KEY"
_LIMITS, _SPEED = "Limits", "Performance"
_limit, _speed = (partial(option, panel=panel) for panel in (_LIMITS, _SPEED))
PANELS = (_LIMITS, _SPEED)


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
        "Seconds until a request's last token, with its time in the queue.",
        "--request-timeout",
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
    device: Device = device_option(_SPEED)
    threads: int | None = threads_option(_SPEED)
    dtype: StoredAs | None = dtype_option(_SPEED)
    cache_dtype: CacheDtype | None = cache_dtype_option(_SPEED)

    def __post_init__(self) -> None:
        check_ranges(self)
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
