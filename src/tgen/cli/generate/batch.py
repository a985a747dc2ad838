"""All texts of one `tgen generate`: requests to the model, and the tokens it returns."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.generate.chat import message
from tgen.cli.generate.input_lines import LineReader
from tgen.cli.generate.input_rows import Generation, check_row, parse_object
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.generate.output import Writer, format_stats, format_summary
from tgen.config import SamplingConfig
from tgen.distributed import Ranks, all_gather
from tgen.errors import UsageError

if TYPE_CHECKING:
    from tgen.chat.render_process import Message
    from tgen.generation.context_window import Request
    from tgen.loaded_model import LoadedModel
    from tgen.reports.generation import Token


class RequestQueue:
    """A source of requests for the model, which passes their tokens to the writer."""

    def __init__(
        self,
        model: "LoadedModel",
        sampling: SamplingConfig,
        writer: Writer,
        options: GenerateOptions,
        *,
        ranks: Ranks,
        messages: "list[Message] | None" = None,
    ) -> None:
        """Each rank takes every `world_size`-th row. With `messages`, each prompt is the next user
        message of that chat."""
        self._model, self._sampling, self._writer, self._options = model, sampling, writer, options
        self._messages, self._ranks = messages, ranks
        self._context = model.engine.context_length
        self._lines: LineReader | None = None
        self._jsonl: bool | None = None  # None: unknown before the first line
        self._line = 0
        self._n_rows = self._n_requests = self._n_tokens = 0
        self._pending: deque[tuple[Generation, Request]] = deque()
        self._active: dict[int, Generation] = {}
        self._last: Generation | None = None
        self._warned = False  # about a prompt longer than the context
        self.failed = False  # a row was invalid, or a constrained text incomplete

    def add(self, prompt: bytes) -> None:
        """Add a prompt of the command line."""
        first = Generation(row=self._n_rows, prompt=prompt, echo=self._options.echo)
        self._add(first, {}, self._options.samples)

    def read(self, lines: LineReader, *, jsonl: bool) -> None:
        """Take prompts from lines as they come: JSON if `jsonl` or if the first looks like it."""
        self._lines, self._jsonl = lines, jsonl or None

    def next(self, wait: bool) -> "Request | None":
        """Return the next request; see `generation.loop.RequestSource`."""
        while not self._pending:
            line = self._lines.next(wait=wait) if self._lines else None
            if line is None:
                return None
            self._line += 1
            self._read(line)
        generation, request = self._pending.popleft()
        self._active[self._n_requests] = generation
        self._n_requests += 1
        generation.seconds = [time.perf_counter()]
        return request

    def on_token(self, token: "Token") -> None:
        """Take a token from the model."""
        generation = self._active[token.sequence]
        generation.tokens.append(token)
        generation.text += token.text
        generation.seconds = [*generation.seconds[:2], time.perf_counter()]
        self._n_tokens += 1
        self._writer.update()
        if token.last:
            del self._active[token.sequence]
            self._end(generation)

    def finish(self) -> None:
        """Finish the output here, then on all ranks."""
        self._writer.finish(self._n_rows)
        results = all_gather((self._n_tokens, self.failed))
        self._n_tokens = sum(n for n, _ in results)
        self.failed = any(failed for _, failed in results)

    def summary(self, seconds: float) -> Iterator[str]:
        """Yield summary lines: rows, tokens and speed."""
        n_rows = self._n_rows if self._n_rows > 1 or self._lines else None
        yield format_summary(n_rows, self._n_tokens, seconds)
        if self._options.stats and self._last and not self._lines:
            yield format_stats(self._last)

    def _read(self, line: bytes) -> None:
        """Turn a line of the input into requests, or an error."""
        if self._jsonl is None:
            self._jsonl = line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{")
        if self._jsonl and not line.strip():
            return
        if self._n_rows % self._ranks.world_size != self._ranks.rank:
            self._n_rows += 1
            return
        samples, echo = self._options.samples, self._options.echo
        first = Generation(row=self._n_rows, line=self._line, prompt=line, echo=echo)
        try:
            values: dict[str, Any] = {}
            if self._jsonl:
                fields = parse_object(line)
                first.id = fields.pop("id", None)
                row = check_row(fields, samples=samples, echo=echo)
                first.prompt, first.echo = row.prompt, row.echo
                samples, values = row.samples, row.sampling
            self._add(first, values, samples)
        except UsageError as error:
            first.error, self.failed = error, True
            self._n_rows += 1
            self._print(first, error.message, error=True)
            self._writer.begin(first)
            self._writer.update()

    def _add(self, first: Generation, values: dict[str, Any], samples: int) -> None:
        """Add the requests of a row; raise UsageError, and add none, if it cannot be continued."""
        from tgen.generation.sampling import row_seed, sample_seed

        sampling = replace(self._sampling, **values)
        if "seed" not in values:
            sampling = replace(sampling, seed=row_seed(sampling.seed, first.row))
        request = self._request(first.prompt, sampling)
        n = len(request.prompt)
        if n > self._context and sampling.overflow == "slide" and not self._warned:
            self._warned = True
            message = f"the prompt has {n} tokens, more than the context of {self._context}"
            self._print(first, f"warning: {message}; only its end is used")
        for sample in range(samples):
            own = replace(sampling, seed=sample_seed(sampling.seed, sample))
            generation = replace(
                first,
                sample=sample,
                prompt_tokens=n,
                sampling=own,
                text=bytearray(),
                tokens=[],
                seconds=[],
            )
            self._writer.begin(generation)
            if own.max_new_tokens:
                self._pending.append((generation, request._replace(sampling=own)))
            else:
                self._writer.update()
                self._end(generation)
        self._n_rows += 1

    def _request(self, prompt: bytes, sampling: SamplingConfig) -> "Request":
        if self._messages is None:
            return self._model.request(self._model.encode(prompt), sampling)
        return self._model.chat_request([*self._messages, message("user", prompt)], sampling)

    def _end(self, generation: Generation) -> None:
        self._last = generation
        if not generation.complete:
            self.failed = True
            self._writer.close()  # on a terminal, the message starts on its own line
            n = len(generation.tokens)
            text = f"the text is incomplete after {n} token{'' if n == 1 else 's'}"
            cut_off = generation.finish == "length"
            reason = "raise --max-new-tokens" if cut_off else "no token can follow"
            self._print(generation, f"{text}: {reason}", error=True)

    def _print(self, generation: Generation, text: str, *, error: bool = False) -> None:
        where = "" if generation.line is None else f"line {generation.line}: "
        prefix = "error: " if error else ""
        console.print_status(prefix + where + text, quiet=self._options.quiet and not error)
