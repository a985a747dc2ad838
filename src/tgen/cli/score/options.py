"""The options of `tgen score`. Does not import torch."""

from dataclasses import dataclass
from functools import partial

from tgen.cli.options import (
    Device,
    device_option,
    json_option,
    model_option,
    quiet_option,
    threads_option,
)
from tgen.config import CacheDtype, StoredAs
from tgen.config.option import check_ranges, option
from tgen.errors import UsageError

_SPEED = "Performance"
_speed = partial(option, panel=_SPEED)
PANELS = ("Output", _SPEED)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The options of `tgen score`."""

    files: list[str] = option(
        default_factory=list,
        help_text="Files, directories, glob patterns, or - for stdin. "
        '.jsonl files hold {"text"}, {"prompt", "completion"} or {"messages"} rows.',
        argument=True,
        metavar="FILE",
    )
    model: str | None = model_option()
    compare: str | None = model_option(
        help_text="Second model to score the same texts with, for the difference.",
        flags="--compare",
        shown_default="",
    )
    stride: int | None = option(
        None,
        "Number of tokens by which the context moves in texts that are longer. With a smaller "
        "number, tokens are predicted from a longer context, in more time.",
        "--stride",
        shown_default="half the context",
        low=1,
    )
    per_token: bool = option(
        False, "Write every token with its surprisal and rank.", "--per-token", panel="Output"
    )
    json: bool = json_option("Write one JSON object per line: per document, and the total.")
    quiet: bool = quiet_option()
    device: Device = device_option(_SPEED)
    threads: int | None = threads_option(_SPEED)
    dtype: StoredAs | None = _speed(
        None,
        "Data type of the weights in memory, on a CPU.",
        "--dtype",
        shown_default="as stored",
    )
    cache_dtype: CacheDtype | None = _speed(
        None,
        "Data type of the KV cache, on a CPU.",
        "--cache-dtype",
        shown_default="float32 with float32 weights, else float16",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.files:
            raise UsageError("no text", "name a file, or - for stdin")
        if self.per_token and self.compare is not None:
            raise UsageError("--per-token cannot be combined with --compare", "remove one of them")
