"""Counters and histograms in Prometheus' text format, with vLLM's names behind `tgen_`.

Only the event loop changes them. Labels come from closed sets, so the number of series is bounded.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds.
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class _Histogram:
    """Counts of observed seconds by upper bound."""

    def __init__(self, help_text: str) -> None:
        self.help_text = help_text
        self._counts, self._sum = [0] * (len(_BOUNDS) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(_BOUNDS, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Yield the cumulative counts, the sum and the count."""
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Numbers of requests and tokens since the start of the server."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()  # by HTTP status
        self.texts = 0  # accepted
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._new_tokens = self._cancelled = 0
        self._histograms = {
            "request_queue_time_seconds": _Histogram("Time in the queue."),
            "time_to_first_token_seconds": _Histogram("Time from the request to the first token."),
            "time_per_output_token_seconds": _Histogram("Mean time per token after the first."),
            "e2e_request_latency_seconds": _Histogram("Time from the request to its last token."),
        }

    def observe(self, job: Job, answer: Answer, now: float) -> None:
        """Count a request whose texts have ended or been cancelled at `now`."""
        self._prompt_tokens += answer.prompt_tokens
        self._new_tokens += answer.new_tokens
        self._finished.update(answer.finishes)
        self._cancelled += len(job.requests) - len(answer.finishes)
        seconds = {}
        if job.started is not None:
            seconds["request_queue_time_seconds"] = job.started - job.submitted
        if job.first_token is not None:
            seconds["time_to_first_token_seconds"] = job.first_token - job.submitted
            if answer.is_complete:
                seconds["e2e_request_latency_seconds"] = now - job.submitted
                if (n := answer.new_tokens - len(job.requests)) > 0:
                    per_token = (now - job.first_token) * len(job.requests) / n
                    seconds["time_per_output_token_seconds"] = per_token
        for name, value in seconds.items():
            self._histograms[name].observe(value)

    def render(self, *, n_running: int, n_waiting: int) -> str:
        """Return all metrics as text."""
        lines = [
            *_simple("num_requests_running", "gauge", "Texts in the batch.", n_running),
            *_simple("num_requests_waiting", "gauge", "Texts in the queue.", n_waiting),
            *_simple("prompt_tokens_total", "counter", "Prompt tokens.", self._prompt_tokens),
            *_simple("generation_tokens_total", "counter", "New tokens.", self._new_tokens),
            *_simple("texts_total", "counter", "Texts accepted.", self.texts),
            *_simple("texts_cancelled_total", "counter", "Texts cut off.", self._cancelled),
            *_declare("request_success_total", "counter", "Texts that ended, by reason."),
        ]
        for reason in ("stop", "length", "tool_calls"):
            count = self._finished[reason]
            lines.append(f'tgen_request_success_total{{finished_reason="{reason}"}} {count}')
        lines += _declare("http_responses_total", "counter", "HTTP responses, by status.")
        for status, count in sorted(self.responses.items()):
            lines.append(f'tgen_http_responses_total{{status="{status}"}} {count}')
        for name, histogram in self._histograms.items():
            lines += _declare(name, "histogram", histogram.help_text)
            lines += histogram.lines(f"tgen_{name}")
        return "\n".join(lines) + "\n"


def _simple(name: str, kind: str, help_text: str, value: int) -> list[str]:
    return [*_declare(name, kind, help_text), f"tgen_{name} {value}"]


def _declare(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP tgen_{name} {help_text}", f"# TYPE tgen_{name} {kind}"]
