"""The texts that one `tgen generate` is to write, as requests to the model, and what comes back."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tgen.cli import console
from tgen.cli.generate.chat import message
from tgen.cli.generate.input_rows import (
    Generation,
    pop_row_option,
    row_fields,
    row_prompt,
    row_sampling,
)
from tgen.cli.generate.line_reader import LineReader
from tgen.cli.generate.output import format_stats
from tgen.config import SamplingConfig
from tgen.distributed import Ranks, all_gather
from tgen.errors import UsageError

if TYPE_CHECKING:
    from tgen.api import Model
    from tgen.chat.sandbox import Message
    from tgen.generation.sequence import Request
    from tgen.reports import Token


MAX_SAMPLES = 1 << 16


class Writer(Protocol):
    """Where texts go."""

    def begin(self, entry: Generation) -> None:
        """Another text will come, or the error in its place."""

    def update(self) -> None:
        """Writes what can be written now."""

    def finish(self, n_rows: int) -> None:
        """All rows are done, of so many that there are on all ranks."""

    def close(self) -> None:
        """All is written."""


class RequestQueue:
    """Gives the model one request after another, and the writer what becomes of them."""

    def __init__(
        self,
        model: "Model",
        sampling: SamplingConfig,
        writer: Writer,
        *,
        samples: int,
        echo: bool,
        quiet: bool,
        ranks: Ranks,
        opening: "list[Message] | None" = None,
    ) -> None:
        """Of the rows that are read each rank takes its own. With an `opening`, perhaps empty, each
        prompt is what a user says after it in a chat."""
        self._quiet, self._opening = quiet, opening
        self._model, self._sampling, self._writer = model, sampling, writer
        self._samples, self._echo, self._ranks = samples, echo, ranks
        self._n_rows = self._n_asked = 0
        self._pending: deque[tuple[Generation, Request]] = deque()
        self._under_way: dict[int, Generation] = {}
        self._context = model.engine.context_length
        self._told = False  # that a prompt is longer than the context
        self._lines: LineReader | None = None
        self._jsonl: bool | None = None  # None: not known before the first line
        self._line = 0
        self._n_tokens = 0
        self._last: Generation | None = None
        self.failed = False  # a row was wrong, or is not of its form

    def add(self, prompt: bytes) -> None:
        """A prompt, and as many texts as there are to be samples."""
        self._add(Generation(row=self._n_rows, prompt=prompt, echo=self._echo), {}, self._samples)

    def read(self, lines: LineReader, *, jsonl: bool) -> None:
        """Prompts, a line each, as they come: as JSON if `jsonl` or the first looks like it."""
        self._lines, self._jsonl = lines, jsonl or None

    def next(self, wait: bool) -> "Request | None":
        """The next request; see `generation.loop.Waiting`."""
        while not self._pending:
            line = self._lines.next(wait=wait) if self._lines else None
            if line is None:
                return None
            self._line += 1
            self._read(line)
        entry, request = self._pending.popleft()
        self._under_way[self._n_asked] = entry
        self._n_asked += 1
        entry.seconds = [time.perf_counter()]
        return request

    def take(self, token: "Token") -> None:
        """What the model gave."""
        entry = self._under_way[token.row]
        entry.tokens.append(token)
        entry.text += token.text
        entry.seconds = [*entry.seconds[:2], time.perf_counter()]
        self._n_tokens += 1
        self._writer.update()
        if token.last:
            del self._under_way[token.row]
            self._ended(entry)

    def finish(self) -> None:
        """All is done here, and then on all ranks."""
        self._writer.finish(self._n_rows)
        done = all_gather((self._n_tokens, self.failed))
        self._n_tokens = sum(n for n, _ in done)
        self.failed = any(failed for _, failed in done)

    def summary(self, seconds: float, *, stats: bool) -> Iterator[str]:
        """What was done, in lines."""
        rate = f"{self._n_tokens / seconds:,.0f} tokens/s, prefill included"
        if self._n_rows > 1 or self._lines:
            yield f"{self._n_rows:,} rows · {self._n_tokens:,} tokens · {rate}"
        else:
            yield f"{self._n_tokens} tokens · {rate if self._n_tokens else 'nothing was asked for'}"
        if stats and self._last and not self._lines:
            yield format_stats(self._last)

    def _read(self, line: bytes) -> None:
        """A line of the input: some requests, or an error."""
        if self._jsonl is None:
            self._jsonl = line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{")
        if self._jsonl and not line.strip():
            return
        if self._n_rows % self._ranks.world_size != self._ranks.rank:
            self._n_rows += 1
            return
        entry = Generation(row=self._n_rows, line=self._line, prompt=line, echo=self._echo)
        try:
            given = row_fields(line) if self._jsonl else {}
            entry.id = given.pop("id", None)
            if self._jsonl:
                entry.prompt = row_prompt(given)
            entry.echo = pop_row_option(given, "echo", self._echo)
            samples = pop_row_option(given, "samples", self._samples)
            if not 1 <= samples <= MAX_SAMPLES:
                wanted = f"samples must be a number from 1 to {MAX_SAMPLES:,}"
                raise UsageError(f"samples is {samples}", wanted)
            self._add(entry, given, samples)
        except UsageError as error:
            entry.error, self.failed = error, True
            self._n_rows += 1
            self._note(entry, error.message, error=True)
            self._writer.begin(entry)
            self._writer.update()

    def _ended(self, entry: Generation) -> None:
        self._last = entry
        if not entry.complete:
            self.failed = True
            self._writer.close()  # on a terminal what follows begins a line
            self._note(entry, _incomplete(entry), error=True)

    def _note(self, entry: Generation, text: str, *, error: bool = False) -> None:
        where = "" if entry.line is None else f"line {entry.line}: "
        console.print_status(
            ("error: " if error else "") + where + text, quiet=self._quiet and not error
        )

    def _add(self, first: Generation, given: dict[str, Any], samples: int) -> None:
        """Raises UsageError, and adds nothing, where a row cannot be continued as it is to be."""
        from tgen.generation.sampling import row_seed, sample_seed

        sampling = row_sampling(self._sampling, given)
        if "seed" not in given:
            sampling = replace(sampling, seed=row_seed(sampling.seed, first.row))
        request = self._request(first.prompt, sampling)
        ids = request.prompt
        if len(ids) > self._context and sampling.overflow == "slide" and not self._told:
            self._told = True
            text = f"the prompt has {len(ids)} tokens, the context {self._context}"
            self._note(first, f"{text}: only its end is seen")
        for sample in range(samples):
            own = replace(sampling, seed=sample_seed(sampling.seed, sample))
            entry = Generation(
                row=first.row,
                sample=sample,
                line=first.line,
                id=first.id,
                prompt=first.prompt,
                n_prompt=len(ids),
                echo=first.echo,
                sampling=own,
            )
            self._writer.begin(entry)
            if own.max_new_tokens:
                self._pending.append((entry, request._replace(sampling=own)))
            else:
                self._writer.update()
                self._ended(entry)
        self._n_rows += 1

    def _request(self, prompt: bytes, sampling: SamplingConfig) -> "Request":
        if self._opening is None:
            return self._model.request(self._model.encode(prompt), sampling)
        return self._model.chat_request([*self._opening, message("user", prompt)], sampling)


def _incomplete(entry: Generation) -> str:
    n = len(entry.tokens)
    text = f"the text is incomplete after {n} token{'' if n == 1 else 's'}"
    return text + (": give more with -n" if entry.finish == "length" else ": nothing may follow")
