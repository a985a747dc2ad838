"""The process that computes attention for the live page: one JSON request per line, one JSON answer
per line.

It has torch and the model's weights in float32, one thread and the lowest priority. It serves one
model at a time.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tgen.drawing.page.attention_page import lens_data, pack_weights
from tgen.drawing.terminal_text import label
from tgen.errors import TgenError
from tgen.inspection.inspector import Inspector
from tgen.inspection.logit_attribution import attribute_logit
from tgen.lora.model_with_adapter import load
from tgen.machine.memory import free_ram
from tgen.machine.resource_limit import limit_cpu_time, set_limit
from tgen.reports.inspection import Matrix

_LOWEST_PRIORITY = 19
_MEMORY_SHARE = 0.5  # of the free memory
_MIN_BYTES = 2 << 30
_THUMBNAIL = 32  # pixels
_LENS_POSITIONS = 24
_TOP_TOKENS = _TOP_PARTS = 16


def main() -> None:
    """Answer requests until the end of stdin.

    A request has the `path`, `adapter` and `stamp` of a model, the `view`, token `ids`, the
    `seconds` of CPU time that it may take, and what the view needs. The answer has what the view
    returns, or the `error`, or `not_loaded`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    if (free := free_ram()) is not None:
        set_limit("RLIMIT_DATA", max(int(_MEMORY_SHARE * free), _MIN_BYTES))
    import torch

    torch.set_num_threads(1)
    opened: tuple[tuple[str, str | None, str], Inspector] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        limit_cpu_time(request["seconds"])
        model = request["path"], request["adapter"], request["stamp"]
        try:
            if opened is None or opened[0] != model:
                opened = None  # two models would take twice the memory
                opened = model, _open(request)
            inspector = opened[1]
            inspector.ids = request["ids"]
            answer = _VIEWS[request["view"]](inspector, request)
        except _NotLoadedError:  # its message may name paths
            answer = {"not_loaded": True}
        except TgenError as error:
            answer = {"error": error.message}
        sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
        sys.stdout.flush()


class _NotLoadedError(Exception):
    """The model is damaged or gone, or has changed since the server loaded it."""


def _open(request: dict[str, Any]) -> Inspector:
    adapter = request["adapter"] and Path(request["adapter"])
    try:
        bundle = load(Path(request["path"]), adapter=adapter)
    except (TgenError, OSError):
        raise _NotLoadedError from None
    if str(bundle.stamp) != request["stamp"]:
        raise _NotLoadedError
    return Inspector(bundle, None)


def _heads(inspector: Inspector, _: dict[str, Any]) -> dict[str, Any]:
    """Return a small picture of each head, layer by layer."""
    config = inspector.config
    pictures = []
    for layer in range(config.n_layers):
        selected = [(layer, head) for head in range(config.n_heads)]
        reports = inspector.attention(selected)
        pictures.append([_thumbnail(report.weights) for report in reports])
    return {"side": min(_THUMBNAIL, len(inspector.ids)), "pictures": pictures}


def _thumbnail(weights: Matrix) -> str:
    """Return the largest weight of each square of a matrix (T, T), packed."""
    n = len(weights)
    side = min(_THUMBNAIL, n)
    starts = np.arange(side) * n // side
    rows = np.maximum.reduceat(weights, starts, axis=0)
    return pack_weights(np.maximum.reduceat(rows, starts, axis=1))


def _attention(inspector: Inspector, request: dict[str, Any]) -> dict[str, Any]:
    """Return the packed weights of a head, and its sliding window."""
    (report,) = inspector.attention([(request["layer"], request["head"])])
    return {"window": report.window, "weights": pack_weights(report.weights)}


def _lens(inspector: Inspector, request: dict[str, Any]) -> dict[str, Any]:
    """Return the most likely tokens after each layer, at the position and at those before it."""
    query = request["query"]
    first = max(0, query - _LENS_POSITIONS + 1)
    return lens_data(inspector.logit_lens(query=query, first=first, last=query))


def _why(inspector: Inspector, request: dict[str, Any]) -> dict[str, Any]:
    """Return what made the logit of the target: earlier tokens, the most important first, and the
    largest parts; the latest `left_out` tokens are also left out."""
    query, target = request["query"], request["target"]
    report = attribute_logit(
        inspector.model,
        inspector.tokenizer,
        inspector.ids,
        query=query,
        target=None if target is None else [target],
        left_out=range(max(0, query + 1 - request["left_out"]), query + 1),
    )
    tokens = [
        {
            "index": token.position,
            "attention": token.logit,
            "without": None if token.logit_without is None else token.logit_without - report.logit,
        }
        for token in report.tokens
    ]
    tokens.sort(key=lambda token: -max(abs(token["attention"] or 0), abs(token["without"] or 0)))
    sums = {"its own embedding": report.embedding, "feed-forward layers": report.feed_forward}
    sums["biases"] = report.biases
    return {
        "target": "".join(map(label, map(inspector.tokenizer.token_bytes, report.targets))),
        "logit": report.logit,
        "probability": math.exp(report.log_probability),
        "tokens": tokens[:_TOP_TOKENS],
        "all_tokens": sum(token.logit or 0 for token in report.tokens),
        "sums": {name: value for name, value in sums.items() if value is not None},
        "parts": [
            {"name": part.component, "logit": part.logit}
            for part in report.contributions[:_TOP_PARTS]
        ],
    }


_VIEWS: dict[str, Callable[[Inspector, dict[str, Any]], dict[str, Any]]] = {
    "heads": _heads,
    "attention": _attention,
    "lens": _lens,
    "why": _why,
}

if __name__ == "__main__":
    main()
