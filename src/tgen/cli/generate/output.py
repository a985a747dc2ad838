"""The output of `tgen generate`: tokens in, text or JSON objects out."""

import heapq
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from tgen.checkpoint.hf.generation_config import GenerationDefaults
from tgen.cli import console
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.options import name_flags
from tgen.config import SamplingConfig
from tgen.distributed import all_gather, gather
from tgen.errors import TgenError
from tgen.reports.generation import Rates, Token, measure_rates
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


@dataclass(kw_only=True)
class Generation:
    """One text of the output: waiting, in progress, finished or failed."""

    row: int
    sample: int = 0
    line: int | None = None  # input line, from 1
    id: Any = None  # from the row, returned unchanged
    prompt: bytes
    prompt_tokens: int = 0
    echo: bool
    sampling: SamplingConfig
    error: TgenError | None = None
    text: bytearray = field(default_factory=bytearray)  # bytes that no writer has taken yet
    n_tokens: int = 0
    tokens: list[Token] = field(default_factory=list)  # only for JSON output
    last: Token | None = None
    seconds: list[float] = field(default_factory=list)  # at the start, first and last token
    output: bytes | None = None  # a writer's output for the finished text

    @property
    def where(self) -> str:
        """The start of a message about it."""
        return "" if self.line is None else f"line {self.line}: "

    @property
    def finish(self) -> str:
        """Why the text ended."""
        return (self.last.finish if self.last else None) or "length"

    @property
    def complete(self) -> bool:
        """Whether the text satisfies its constraint."""
        return self.last.complete if self.last else not self.sampling.constrained

    @property
    def rates(self) -> Rates:
        """Its latency and rates so far."""
        return measure_rates(self.seconds, prompt_tokens=self.prompt_tokens, n_tokens=self.n_tokens)


class Writer:
    """A writer of texts in the order of the rows, as soon as all before them are finished.

    A waiting text is stored as its output alone; `waiting_bytes` is the memory of all waiting
    texts.
    """

    def __init__(self, to_bytes: Callable[[Generation], bytes], *, keep_tokens: bool) -> None:
        """`to_bytes` returns a text's output, from its tokens if `keep_tokens`."""
        self._to_bytes, self._keep_tokens = to_bytes, keep_tokens
        self._waiting: deque[Generation] = deque()
        self._active: dict[int, Generation] = {}  # by number of the request
        self._n_requests = 0
        self._bug: Exception | None = None
        self._failed_rows: set[int] = set()
        self.waiting_bytes = 0
        self.n_tokens = 0
        self.n_failed = 0  # rows that were invalid or whose text is incomplete; set by `finish`
        self.last: Generation | None = None  # that ended

    def begin(self, generation: Generation) -> None:
        """Add the next text, or the next error."""
        self._waiting.append(generation)

    def start(self, generation: Generation) -> None:
        """Take the tokens of the next request for this text."""
        self._active[self._n_requests] = generation
        self._n_requests += 1
        generation.seconds = [time.perf_counter()]

    def add(self, token: Token) -> None:
        """Take a token from the model."""
        generation = self._active[token.sequence]
        generation.last = token
        generation.n_tokens += 1
        if self._keep_tokens:
            generation.tokens.append(token)
        generation.text += token.text
        generation.seconds = [*generation.seconds[:2], time.perf_counter()]
        self.n_tokens += 1
        if token.last:
            self.end(self._active.pop(token.sequence))
        else:
            self.update()

    def on_error(self, number: int, error: Exception) -> None:
        """End the text of a request that failed."""
        self.fail(self._active.pop(number), error)

    def end(self, generation: Generation) -> None:
        """End a text whose last token is known."""
        self.last = generation
        self._store(generation)
        if not generation.complete:
            text = f"the text is incomplete after {count(generation.n_tokens, 'token')}"
            cut_off = generation.finish == "length"
            reason = "raise --max-new-tokens" if cut_off else "no token can follow"
            self._print_error(generation, f"{text}: {reason}")

    def fail(self, generation: Generation, error: Exception) -> None:
        """End a row with an error; other rows are not affected."""
        if not isinstance(error, TgenError):
            self._bug = self._bug or error  # reported once the other rows are done
            reason = f"{type(error).__name__}: {error}"
            error = TgenError(f"internal error: {reason[:200]}", "report it as a bug in tgen")
        if generation.line is None:
            error = name_flags(GenerateOptions, error)
        generation.error = error
        self._store(generation)
        self._print_error(generation, error.message)
        if generation.line is None and error.hint:
            console.print_line(f"hint: {error.hint}")

    def update(self) -> None:
        """Write what can be written now."""
        if lines := b"".join(self._finished()):
            console.write(lines)

    def finish(self, n_rows: int) -> None:  # noqa: ARG002  GatherWriter uses it
        """Finish the output of all `n_rows` rows here, then on all ranks; raise an internal error,
        if any."""
        results = all_gather((self.n_tokens, len(self._failed_rows)))
        self.n_tokens = sum(n for n, _ in results)
        self.n_failed = sum(n for _, n in results)
        if self._bug is not None:
            raise self._bug

    def end_line(self) -> None:
        """End the current line before a message on stderr, if it would follow a text there."""

    def close(self) -> None:
        """End the output."""

    def _store(self, generation: Generation) -> None:
        generation.output = self._to_bytes(generation)
        generation.prompt, generation.text, generation.tokens = b"", bytearray(), []
        self.waiting_bytes += len(generation.output) + _WAITING_BYTES
        self.update()

    def _finished(self) -> Iterator[bytes]:
        """Remove and yield the output of the first texts, as long as they are finished."""
        while self._waiting and (output := self._waiting[0].output) is not None:
            self._waiting.popleft()
            self.waiting_bytes -= len(output) + _WAITING_BYTES
            yield output

    def _print_error(self, generation: Generation, text: str) -> None:
        self._failed_rows.add(generation.row)
        self.end_line()
        console.print_line(f"error: {generation.where}{text}")


class TextWriter(Writer):
    """A writer of texts in order, streaming the first unfinished one; each of several ends with a
    line break."""

    def __init__(self, *, several: bool) -> None:
        from tgen.tokenizer import TextStream

        to_bytes = text_line if several else lambda generation: bytes(generation.text)
        super().__init__(to_bytes, keep_tokens=False)
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
            console.print_line("")  # a line break that is not part of the text
            self._at_line_start = True

    def close(self) -> None:
        """End the last line on a terminal."""
        if sys.stdout is not None and sys.stdout.isatty() and not self._at_line_start:
            self._put(b"\n")

    def _put(self, data: bytes) -> None:
        if data:
            console.write(data)
            self._at_line_start = data.endswith(b"\n")


class GatherWriter(Writer):
    """A writer that gathers all ranks' output on rank 0, which writes it in row order.

    At regular intervals, all ranks send the output of their next rows.
    """

    def __init__(
        self, to_bytes: Callable[[Generation], bytes], *, keep_tokens: bool, n_rows: int
    ) -> None:
        """Make a writer; ranks gather after every `n_rows` rows."""
        super().__init__(to_bytes, keep_tokens=keep_tokens)
        self._n_rows = self._next_gather = n_rows
        self._output: list[tuple[int, bytes]] = []

    def update(self) -> None:
        """Collect finished rows in order; gather once all rows before `_next_gather` are done."""
        while self._waiting:
            row = self._waiting[0].row
            if row >= self._next_gather:
                self._gather_and_write()
            elif self._waiting[0].output is not None:
                self._output.append((row, next(self._finished())))
            else:
                return

    def finish(self, n_rows: int) -> None:
        """Gather the rest of `n_rows` input rows."""
        while self._next_gather - self._n_rows < n_rows:
            self._gather_and_write()
        super().finish(n_rows)

    def _gather_and_write(self) -> None:
        outputs = gather(self._output)
        if outputs is not None:  # one rank generates all samples of a row, in order
            console.write(b"".join(text for _, text in heapq.merge(*outputs, key=itemgetter(0))))
        self._output = []
        self._next_gather += self._n_rows


def text_line(generation: Generation) -> bytes:
    """Return one of several texts as TextWriter writes it."""
    return bytes(generation.text) + b"\n"


def _stderr_is_stdout() -> bool:
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError):  # closed, or not a file
        return False


def record(
    generation: Generation, *, model: str, token_bytes: Callable[[int], bytes], stats: bool
) -> dict[str, Any]:
    """Return a text, or the error in its place, as a JSON object; `token_bytes` maps a token id to
    its bytes."""
    if (error := generation.error) is not None:
        shown = {"message": error.message, "hint": error.hint}
        return {"schema": SCHEMA, **_row_ids(generation), "error": shown}
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
        fields["stats"] = generation.rates._asdict()
    return fields


def format_summary(n_rows: int | None, n_failed: int, n_tokens: int, seconds: float) -> str:
    """Return what was generated and how fast; `n_rows` None: a single prompt."""
    rate = f"{n_tokens / seconds:,.0f} tokens/s including prefill"
    tokens = count(n_tokens, "token")
    if n_rows is None:
        return f"{tokens} · {rate if n_tokens else 'nothing to generate'}"
    failed = f" ({n_failed:,} failed)" if n_failed else ""
    return f"{count(n_rows, 'row')}{failed} · {tokens} · {rate}"


def format_stats(generation: Generation) -> str:
    """Return the rates of a text as one line."""
    first, prefill, decode = generation.rates
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
