"""All prompts of one `tgen generate`, as requests to the model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tgen.cli import console
from tgen.cli.generate.chat import message
from tgen.cli.generate.input_rows import LineReader, check_row, parse_object, recognize_rows
from tgen.cli.generate.options import GenerateOptions
from tgen.cli.generate.output import Generation, Writer
from tgen.config import SamplingConfig
from tgen.distributed import Ranks

if TYPE_CHECKING:
    from tgen.chat.render import Message
    from tgen.generation.sequence import Request
    from tgen.loaded_model import LoadedModel

_MAX_WAITING_BYTES = 64 << 20  # size of finished texts that wait for an unfinished one


class RequestQueue:
    """A source of requests for the model; the writer takes their tokens."""

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
        self.n_rows = 0
        self._pending: Iterator[tuple[Generation, Request]] = iter(())
        self._warned = False  # about a prompt longer than the context

    def add(self, prompt: bytes) -> None:
        """Add a prompt of the command line; raise UsageError if it cannot be continued."""
        echo, sampling = self._options.echo, self._sampling
        first = Generation(row=self.n_rows, prompt=prompt, echo=echo, sampling=sampling)
        request = self._request(first, {})
        self._pending = self._start_samples(first, request, self._options.samples)
        self.n_rows += 1

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
                self._writer.end(generation)
                continue
            self._writer.start(generation)
            return request
        return None

    def _read(self, line: bytes) -> None:
        """Turn a line of the input into requests, or an error."""
        if self._jsonl is None:
            line, self._jsonl = recognize_rows(line)
        if self._jsonl and not line.strip():
            return
        if self.n_rows % self._ranks.world_size != self._ranks.rank:
            self.n_rows += 1
            return
        samples, echo = self._options.samples, self._options.echo
        first = Generation(
            row=self.n_rows, line=self._line, prompt=line, echo=echo, sampling=self._sampling
        )
        self.n_rows += 1
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
            self._writer.fail(first, error)
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
        if self._options.json_output or self._options.jsonl:
            request = request._replace(described=True)
        n = len(request.prompt)
        if n > self._context and sampling.overflow == "slide" and not self._warned:
            self._warned = True
            text = f"the prompt has {n:,} tokens, more than the context of {self._context:,}"
            warning = f"warning: {first.where}{text}; only its end is used"
            if not self._options.quiet:  # also on a rank that writes no texts
                console.print_line(warning)
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
