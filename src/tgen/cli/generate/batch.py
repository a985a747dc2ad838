"""All texts of one `tgen generate`: requests to the model, and the tokens it returns."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.generate.chat import message
from tgen.cli.generate.input_rows import Generation, LineReader, check_row, parse_object
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.generate.output import Writer, format_stats, format_summary
from tgen.cli.options import name_flags
from tgen.config import SamplingConfig
from tgen.distributed import Ranks, all_gather
from tgen.errors import TgenError

if TYPE_CHECKING:
    from tgen.chat.render_process import Message
    from tgen.generation.sequence import Request
    from tgen.loaded_model import LoadedModel
    from tgen.reports.generation import Token

_MAX_WAITING_BYTES = 64 << 20  # size of finished texts that wait for an unfinished one


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
        self._pending: Iterator[tuple[Generation, Request]] = iter(())
        self._active: dict[int, Generation] = {}
        self._keep_tokens = options.json_output or options.jsonl
        self._last: Generation | None = None
        self._bug: Exception | None = None
        self._warned = False  # about a prompt longer than the context
        self._failed_rows: set[int] = set()  # invalid, or with an incomplete constrained text
        self._n_failed = 0

    def add(self, prompt: bytes) -> None:
        """Add a prompt of the command line; raise UsageError if it cannot be continued."""
        first = Generation(row=self._n_rows, prompt=prompt, echo=self._options.echo)
        request = self._request(first, {})
        self._pending = self._start_samples(first, request, self._options.samples)
        self._n_rows += 1

    def read(self, lines: LineReader, *, jsonl: bool) -> None:
        """Take prompts from lines as they come: JSON if `jsonl` or if the first looks like it."""
        self._lines, self._jsonl = lines, jsonl or None

    def next(self, wait: bool) -> "Request | None":
        """Return the next request; see `generation.loop.RequestSource`."""
        # Finished texts may fill the memory only until the text that they wait for ends.
        while wait or self._writer.waiting_bytes <= _MAX_WAITING_BYTES:
            if (started := next(self._pending, None)) is None:
                line = self._lines.next(wait=wait) if self._lines else None
                if line is None:
                    return None
                self._line += 1
                self._read(line)
                continue
            generation, request = started
            if not request.sampling.max_new_tokens:
                self._end(generation)
                continue
            self._active[self._n_requests] = generation
            self._n_requests += 1
            generation.seconds = [time.perf_counter()]
            return request
        return None

    def on_token(self, token: "Token") -> None:
        """Take a token from the model."""
        generation = self._active[token.sequence]
        generation.last = token
        generation.n_tokens += 1
        if self._keep_tokens:
            generation.tokens.append(token)
        generation.text += token.text
        generation.seconds = [*generation.seconds[:2], time.perf_counter()]
        self._n_tokens += 1
        if token.last:
            del self._active[token.sequence]
            self._end(generation)
        else:
            self._writer.update()

    def on_error(self, number: int, error: Exception) -> None:
        """End the text of a request that failed."""
        self._fail(self._active.pop(number), error)

    def finish(self) -> None:
        """Finish the output here, then on all ranks; raise an internal error, if any."""
        self._writer.finish(self._n_rows)
        results = all_gather((self._n_tokens, len(self._failed_rows)))
        self._n_tokens = sum(n for n, _ in results)
        self._n_failed = sum(n for _, n in results)
        if self._bug is not None:
            raise self._bug

    @property
    def failed(self) -> bool:
        """Whether a row was invalid, or a constrained text incomplete; known after `finish`."""
        return self._n_failed > 0

    def summary(self, seconds: float) -> Iterator[str]:
        """Yield summary lines: rows, tokens and speed."""
        n_rows = self._n_rows if self._n_rows > 1 or self._lines else None
        yield format_summary(n_rows, self._n_failed, self._n_tokens, seconds)
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
        self._n_rows += 1
        try:
            values: dict[str, Any] = {}
            messages: list[Message] | None = None
            if self._jsonl:
                fields = parse_object(line)
                first.id = fields.pop("id", None)
                row = check_row(fields, samples=samples, echo=echo)
                first.prompt, first.echo = row.prompt, row.echo
                samples, values, messages = row.samples, row.sampling, row.messages
            request = self._request(first, values, messages)
        except Exception as error:
            self._writer.begin(first)
            self._fail(first, error)
        else:
            self._pending = self._start_samples(first, request, samples)

    def _request(
        self,
        first: Generation,
        values: dict[str, Any],
        messages: "list[Message] | None" = None,
    ) -> "Request":
        """Return the request of a row's first sample; `messages` are those of the row, if it has
        any. Raise TgenError if it cannot be continued."""
        from tgen.generation.random_numbers import row_seed

        sampling = replace(self._sampling, **values)
        if "seed" not in values:
            sampling = sampling.with_seed(row_seed(sampling.seed, first.row))
        if messages is None and self._messages is not None:
            messages = [*self._messages, message("user", first.prompt)]
        elif messages is not None and messages[0]["role"] != "system":
            messages = [*(self._messages or ()), *messages]  # --system
        if messages is None:
            request = self._model.request(self._model.encode(first.prompt), sampling)
        else:
            request = self._model.chat_request(messages, sampling)
        n = len(request.prompt)
        if n > self._context and sampling.overflow == "slide" and not self._warned:
            self._warned = True
            text = f"the prompt has {n} tokens, more than the context of {self._context}"
            warning = f"warning: {_where(first)}{text}; only its end is used"
            console.print_status(warning, quiet=self._options.quiet)
        return request

    def _start_samples(
        self, first: Generation, request: "Request", n: int
    ) -> "Iterator[tuple[Generation, Request]]":
        """Start the `n` samples of a row one by one."""
        from tgen.generation.random_numbers import sample_seed

        for sample in range(n):
            sampling = request.sampling.with_seed(sample_seed(request.sampling.seed, sample))
            generation = replace(
                first,
                sample=sample,
                prompt_tokens=len(request.prompt),
                sampling=sampling,
                text=bytearray(first.prompt if first.echo else b""),
                tokens=[],
                seconds=[],
            )
            self._writer.begin(generation)
            yield generation, request._replace(sampling=sampling)

    def _end(self, generation: Generation) -> None:
        self._last = generation
        self._writer.end(generation)
        if not generation.complete:
            n = generation.n_tokens
            text = f"the text is incomplete after {n} token{'' if n == 1 else 's'}"
            cut_off = generation.finish == "length"
            reason = "raise --max-new-tokens" if cut_off else "no token can follow"
            self._print_error(generation, f"{text}: {reason}")

    def _fail(self, generation: Generation, error: Exception) -> None:
        """End a row with an error; other rows are not affected."""
        if not isinstance(error, TgenError):
            self._bug = self._bug or error  # reported once the other rows are done
            reason = f"{type(error).__name__}: {error}"
            error = TgenError(f"internal error: {reason[:200]}", "report it as a bug in tgen")
        if generation.line is None:
            error = name_flags(GenerateOptions, error)
        generation.error = error
        self._writer.end(generation)
        self._print_error(generation, error.message)
        if generation.line is None and error.hint:
            console.print_status(f"hint: {error.hint}")

    def _print_error(self, generation: Generation, text: str) -> None:
        self._failed_rows.add(generation.row)
        self._writer.end_line()
        console.print_status(f"error: {_where(generation)}{text}")


def _where(generation: Generation) -> str:
    return "" if generation.line is None else f"line {generation.line}: "
