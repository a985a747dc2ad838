"""The server's metrics."""

from types import SimpleNamespace
from typing import Any

from tgen.serve.engine_thread import Job
from tgen.serve.metrics import Metrics


def test_every_reason_of_an_end_is_counted() -> None:
    metrics = Metrics()
    finishes = ["stop", "length", "length", *["tool_calls"] * 3]
    answer: Any = SimpleNamespace(prompt_tokens=1, new_tokens=2, finishes=finishes)
    metrics.observe(Job([], stream=False), answer, 0.0)
    text = metrics.render(n_running=0, n_waiting=0)
    for n, reason in enumerate(("stop", "length", "tool_calls"), 1):
        assert f'finished_reason="{reason}"}} {n}\n' in text
