"""The output of `tgen generate`: text, or JSON objects."""

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tgen.checkpoint.hf.generation_config import GenerationDefaults
from tgen.cli import console
from tgen.cli.generate.input_rows import Generation
from tgen.reports.generation import Token
from tgen.reports.json_text import json_text
from tgen.reports.number_format import count

SCHEMA = "tgen.generate/2"
_WAITING_BYTES = 4096  # memory per waiting text, besides its output


def status_lines(
    model: str, seed: int, defaults: GenerationDefaults, *, given: Collection[str]
) -> list[str]:
    """Return the lines shown before the text; options in `given` override the model's defaults."""
    used = [
        "greedy" if (name, value) == ("temperature", 0) else f"{name.replace('_', '-')} {value}"
        for name, value in defaults.sampling.items()
        if name not in given
    ]
    lines = [f"{model} · seed {seed}"]
    if used:
        lines.append(f"generation_config.json: {', '.join(used)} (flags override)")
    return lines + defaults.notes


class Writer:
    """A writer of texts in the order of the rows: finished ones wait for those before them.

    A waiting text is stored as its output alone; `waiting_bytes` is the memory of all waiting
    texts. A subclass overrides `update`, and other methods if necessary.
    """

    def __init__(self, to_bytes: Callable[[Generation], bytes]) -> None:
        self._to_bytes = to_bytes
        self._waiting: deque[Generation] = deque()
        self.waiting_bytes = 0

    def begin(self, generation: Generation) -> None:
        """Add the next text, or the next error."""
        self._waiting.append(generation)

    def end(self, generation: Generation) -> None:
        """Finish a text whose last token is known, or that failed."""
        generation.output = self._to_bytes(generation)
        generation.prompt, generation.text, generation.tokens = b"", bytearray(), []
        self.waiting_bytes += len(generation.output) + _WAITING_BYTES
        self.update()

    def update(self) -> None:
        """Write what can be written now."""

    def finish(self, n_rows: int) -> None:
        """Write the rest, once all `n_rows` rows of all ranks are done."""

    def end_line(self) -> None:
        """End the current line before a message on stderr, if it would follow a text there."""

    def close(self) -> None:
        """End the output."""

    def _finished(self) -> Iterator[bytes]:
        """Remove and yield the output of the first texts, as long as they are finished."""
        while self._waiting and (output := self._waiting[0].output) is not None:
            self._waiting.popleft()
            self.waiting_bytes -= len(output) + _WAITING_BYTES
            yield output


class TextWriter(Writer):
    """A writer of texts in order, streaming the first unfinished one; each of several ends with a
    line break."""

    def __init__(self, *, several: bool) -> None:
        from tgen.tokenizer import TextStream

        super().__init__(text_line if several else lambda generation: bytes(generation.text))
        self._stream = TextStream()
        self._at_line_start = True

    def update(self) -> None:
        """Write what can be written now."""
        for output in self._finished():
            self._put(self._stream.feed(output) + self._stream.flush())
        if self._waiting:
            text = self._waiting[0].text
            self._put(self._stream.feed(bytes(text)))
            text.clear()

    def end_line(self) -> None:
        """End the current line if stdout and stderr go to one terminal or file."""
        if not self._at_line_start and _stderr_is_stdout():
            console.print_status("")  # a line break that is not part of the text
            self._at_line_start = True

    def close(self) -> None:
        """End the last line on a terminal."""
        if sys.stdout is not None and sys.stdout.isatty() and not self._at_line_start:
            self._put(b"\n")

    def _put(self, data: bytes) -> None:
        if data:
            console.write(data)
            self._at_line_start = data.endswith(b"\n")


class JsonWriter(Writer):
    """A writer of one JSON object per text, in order, as soon as all before it are finished."""

    def update(self) -> None:
        """Write what can be written now."""
        if lines := b"".join(self._finished()):
            console.write(lines)


def text_line(generation: Generation) -> bytes:
    """Return one of several texts as TextWriter writes it."""
    return bytes(generation.text) + b"\n"


def _stderr_is_stdout() -> bool:
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError):  # closed, or not a file
        return False


def error_record(generation: Generation) -> dict[str, Any]:
    """Return the JSON object for a row that is invalid, or whose text failed."""
    assert generation.error is not None
    return {
        "schema": SCHEMA,
        **_row_ids(generation),
        "error": {"message": generation.error.message, "hint": generation.error.hint},
    }


def record(
    generation: Generation, *, model: str, token_bytes: Callable[[int], bytes], stats: bool
) -> dict[str, Any]:
    """Return a text as a JSON object; `token_bytes` maps a token id to its bytes."""
    sampling, tokens = generation.sampling, generation.tokens
    fields = {
        "schema": SCHEMA,
        "model": model,
        **_row_ids(generation),
        "seed": sampling.seed,
        **json_text(generation.prompt, "prompt"),
        **json_text(bytes(generation.text)),
        "finish_reason": generation.finish,
        "prompt_tokens": generation.prompt_tokens,
        "tokens": [token.id for token in tokens],
        "logprobs": [_nats(token.logprob) for token in tokens],
    }
    if sampling.constrained or not generation.complete:
        fields["complete"] = generation.complete
    if sampling.logprobs:
        fields["top_logprobs"] = [
            [
                {"id": i, **json_text(token_bytes(i)), "logprob": _nats(logprob)}
                for i, logprob in token.top_logprobs
            ]
            for token in tokens
        ]
    if sampling.explain:
        fields["explain"] = [_explained(token, token_bytes) for token in tokens]
    if stats:  # opt-in: otherwise the same command writes the same bytes
        if generation.seconds:
            fields["seconds"] = round(generation.seconds[-1] - generation.seconds[0], 4)
        fields["stats"] = timing_stats(generation)
    return fields


def timing_stats(generation: Generation) -> dict[str, float | None]:
    """Return latency and rates, counted from the request; None: too few tokens to measure."""
    if len(generation.seconds) < 2:
        return dict.fromkeys(
            ("seconds_to_first_token", "prefill_tokens_per_second", "decode_tokens_per_second")
        )
    began, first, last = generation.seconds[0], generation.seconds[1], generation.seconds[-1]
    n_after = generation.n_tokens - 1
    return {
        "seconds_to_first_token": round(first - began, 6),
        "prefill_tokens_per_second": round(generation.prompt_tokens / max(first - began, 1e-9), 1),
        "decode_tokens_per_second": round(n_after / (last - first), 1) if last > first else None,
    }


def format_summary(n_rows: int | None, n_failed: int, n_tokens: int, seconds: float) -> str:
    """Return what was generated and how fast; `n_rows` None: a single prompt."""
    rate = f"{n_tokens / seconds:,.0f} tokens/s including prefill"
    tokens = count(n_tokens, "token")
    if n_rows is None:
        return f"{tokens} · {rate if n_tokens else 'nothing to generate'}"
    failed = f" ({n_failed:,} failed)" if n_failed else ""
    return f"{count(n_rows, 'row')}{failed} · {tokens} · {rate}"


def format_stats(generation: Generation) -> str:
    """Return `timing_stats` as one line."""
    first, prefill, decode = timing_stats(generation).values()
    if first is None:
        return "nothing to measure"
    after = "" if decode is None else f", decode {decode:,.0f} tokens/s"
    return f"time to first token {1000 * first:,.1f} ms ({prefill:,.0f} tokens/s prefill){after}"


def _row_ids(generation: Generation) -> dict[str, Any]:
    ids: dict[str, Any] = {"row": generation.row, "sample": generation.sample}
    if generation.line is not None:
        ids["line"] = generation.line
    if generation.id is not None:
        ids["id"] = generation.id
    return ids


def _explained(token: Token, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    return {
        "id": token.id,
        **json_text(token_bytes(token.id)),
        "probability": round(math.exp(token.logprob), 9),
        "rank": token.rank,
        "entropy": round(token.entropy, 6),
        "removed": [
            {**step._asdict(), "probability": round(step.probability, 9)} for step in token.removed
        ],
    }


def _nats(logprob: float) -> float | None:
    return round(logprob, 6) if logprob > -math.inf else None  # JSON has no infinity
