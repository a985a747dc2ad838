"""Texts as they leave `tgen generate`: bytes, or JSON objects."""

import json
import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from tgen.cli import console
from tgen.cli.generate.input_rows import Generation
from tgen.reports import Token, json_text

SCHEMA = "tgen.generate/1"


class TextWriter:
    """Texts in order; the first that is under way is shown as it comes. Of several, each ends with
    a line break."""

    def __init__(self, *, several: bool) -> None:
        from tgen.tokenizer import TextStream

        self._several = several
        self._waiting: deque[Generation] = deque()
        self._stream = TextStream()
        self._n_shown = 0  # bytes of the first one's text
        self._begun = False
        self._at_line_start = True

    def begin(self, entry: Generation) -> None:
        """Another text will come, or the error in its place."""
        self._waiting.append(entry)

    def update(self) -> None:
        """Writes what can be written now."""
        while self._waiting:
            entry = self._waiting[0]
            if not self._begun and entry.echo and entry.error is None:
                self._put(entry.prompt)
            self._begun = True
            shown = self._stream.feed(bytes(entry.text[self._n_shown :]))
            self._n_shown = len(entry.text)
            self._put(shown)
            if not entry.done:
                return
            self._put(self._stream.flush())
            if self._several:
                self._put(b"\n")
            self._waiting.popleft()
            self._n_shown, self._begun = 0, False

    def finish(self, n_rows: int) -> None:
        """All rows are done."""

    def close(self) -> None:
        """On a terminal the next line begins on a line of its own."""
        if sys.stdout is not None and sys.stdout.isatty() and not self._at_line_start:
            self._put(b"\n")

    def _put(self, data: bytes) -> None:
        if data:
            console.write(data)
            self._at_line_start = data.endswith(b"\n")


class JsonWriter:
    """One JSON object a text, in order, as soon as it and all before it are done."""

    def __init__(self, shown: Callable[[Generation], bytes]) -> None:
        """`shown` is what is written of a text: see `json_line`."""
        self._shown = shown
        self._waiting: deque[Generation] = deque()

    def begin(self, entry: Generation) -> None:
        """Another text will come, or the error in its place."""
        self._waiting.append(entry)

    def update(self) -> None:
        """Writes what can be written now."""
        lines = []
        while self._waiting and self._waiting[0].done:
            lines.append(self._shown(self._waiting.popleft()))
        if lines:
            console.write(b"".join(lines))

    def finish(self, n_rows: int) -> None:
        """All rows are done."""

    def close(self) -> None:
        """Every line is written."""


def text_line(entry: Generation) -> bytes:
    """What TextWriter writes of one of several texts."""
    echoed = entry.prompt if entry.echo and entry.error is None else b""
    return echoed + bytes(entry.text) + b"\n"


def json_line(found: dict[str, Any]) -> bytes:
    """A JSON object on a line."""
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def error_record(entry: Generation) -> dict[str, Any]:
    """What stands in the place of a row that could not be read."""
    assert entry.error is not None
    return {
        "schema": SCHEMA,
        **_row_ids(entry),
        "error": {"message": entry.error.message, "hint": entry.error.hint},
    }


def record(
    entry: Generation, *, model: str, show: Callable[[int], bytes], stats: bool
) -> dict[str, Any]:
    """A text as a JSON object; `show` gives the bytes of a token."""
    sampling, tokens = entry.sampling, entry.tokens
    found = {
        "schema": SCHEMA,
        "model": model,
        **_row_ids(entry),
        "seed": sampling.seed,
        **json_text(entry.prompt, "prompt"),
        **json_text((entry.prompt if entry.echo else b"") + bytes(entry.text)),
        "finish_reason": entry.finish,
        "prompt_tokens": entry.n_prompt,
        "tokens": [token.id for token in tokens],
        "logprobs": [_nats(token.logprob) for token in tokens],
    }
    if sampling.constrained or not entry.complete:
        found["complete"] = entry.complete
    if sampling.logprobs:
        found["likeliest"] = [
            [
                {"id": i, **json_text(show(i)), "logprob": _nats(logprob)}
                for i, logprob in token.likeliest
            ]
            for token in tokens
        ]
    if sampling.explain:
        found["explain"] = [_explained(token, show) for token in tokens]
    if stats:  # else the same command writes the same bytes
        if entry.seconds:
            found["seconds"] = round(entry.seconds[-1] - entry.seconds[0], 4)
        found["stats"] = timing_stats(entry)
    return found


def timing_stats(entry: Generation) -> dict[str, float | None]:
    """How fast a text came, from the request on; None: there was too little to measure."""
    if len(entry.seconds) < 2:
        return dict.fromkeys(
            ("seconds_to_first_token", "prefill_tokens_per_second", "decode_tokens_per_second")
        )
    began, first, last = entry.seconds[0], entry.seconds[1], entry.seconds[-1]
    n_after = len(entry.tokens) - 1
    return {
        "seconds_to_first_token": round(first - began, 6),
        "prefill_tokens_per_second": round(entry.n_prompt / max(first - began, 1e-9), 1),
        "decode_tokens_per_second": round(n_after / (last - first), 1) if last > first else None,
    }


def format_stats(entry: Generation) -> str:
    """The same in words."""
    found = timing_stats(entry)
    first, prefill, decode = found.values()
    if first is None:
        return "nothing to measure"
    after = "" if decode is None else f", then {decode:,.0f} tokens/s"
    return f"first token after {1000 * first:,.1f} ms ({prefill:,.0f} tokens/s of prompt){after}"


def _row_ids(entry: Generation) -> dict[str, Any]:
    place: dict[str, Any] = {"row": entry.row, "sample": entry.sample}
    if entry.line is not None:
        place["line"] = entry.line
    if entry.id is not None:
        place["id"] = entry.id
    return place


def _explained(token: Token, show: Callable[[int], bytes]) -> dict[str, Any]:
    return {
        "id": token.id,
        **json_text(show(token.id)),
        "probability": round(math.exp(token.logprob), 9),
        "rank": token.rank,
        "entropy": round(token.entropy, 6),
        "removed": [
            {**step._asdict(), "probability": round(step.probability, 9)} for step in token.removed
        ],
    }


def _nats(logprob: float) -> float | None:
    return round(logprob, 6) if logprob > -math.inf else None  # JSON has no infinity
