"""Attention, the logit lens and what made a word, for the live page; a process of its own computes
them.

It starts at the first use, and is killed if an answer takes too long or too much memory. Requests
wait for each other, and for the texts that are being generated, but not for long.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import Field

from tgen.loaded_model import LoadedModel
from tgen.machine.child import Child
from tgen.serve.http_error import HttpError, bad_request, busy, timed_out, unavailable
from tgen.serve.json_body import JsonObject, validate
from tgen.serve.live_views import Ids, check_length
from tgen.serve.preparation import check_ids

VIEWS = ("heads", "attention", "lens", "why")
_SECONDS = 60  # of CPU time of one answer
_MAX_WAITING = 8
_PATIENCE = 0.5  # seconds until it computes beside texts
_POLL_SECONDS = 0.05
_LEFT_OUT = 32  # tokens: each takes a pass over those after it


class _Request(JsonObject, extra="forbid"):
    ids: Ids
    layer: Annotated[int, Field(ge=0)] = 0
    head: Annotated[int, Field(ge=0)] = 0
    query: Annotated[int, Field(ge=0)] = 0
    target: Annotated[int, Field(ge=0)] | None = None
    left_out: Annotated[int, Field(ge=0, le=_LEFT_OUT)] = _LEFT_OUT


class InspectionProcess:
    """The process, and the requests that wait for it."""

    def __init__(self) -> None:
        self._child = Child("-m", "tgen.serve.inspection_child")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspect")
        self._n_waiting = 0

    async def inspect(
        self, view: str, model: LoadedModel, values: dict[str, Any], n_texts: Callable[[], int]
    ) -> dict[str, Any]:
        """Return a view of a text; `n_texts` tells how many texts are being generated.

        Raises HttpError.
        """
        request = validate(_Request, values)
        _check(model, view, request)
        if self._n_waiting >= _MAX_WAITING:
            raise busy("too many requests wait for attention", "overloaded")
        self._n_waiting += 1
        try:
            waited = 0.0
            while n_texts() and waited < _PATIENCE:
                await asyncio.sleep(_POLL_SECONDS)
                waited += _POLL_SECONDS
            bundle = model.bundle
            line = request.model_dump() | {"view": view, "path": str(bundle.path)}
            line |= {"stamp": str(bundle.stamp), "seconds": _SECONDS}
            line["adapter"] = None if bundle.adapter is None else str(bundle.adapter)
            run = asyncio.get_running_loop().run_in_executor
            answer = await run(self._thread, self._ask, line)
        finally:
            self._n_waiting -= 1
        if "not_loaded" in answer:
            raise unavailable(
                "the model has changed since the server loaded it", "model_not_loaded"
            )
        if "error" in answer:
            raise bad_request(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, also while it computes."""
        if self._child.process is not None:
            self._child.process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._child.ask(line, _SECONDS)
        except TimeoutError:
            raise timed_out(f"attention took more than {_SECONDS} s of CPU time") from None
        except EOFError:
            message = "the text takes too much memory to inspect; shorten it"
            raise HttpError(400, message, code="out_of_memory") from None


def _check(model: LoadedModel, view: str, request: _Request) -> None:
    """Raise HttpError for numbers that the model or the text does not have."""
    config, n = model.bundle.config, len(request.ids)
    limits = {"layer": config.n_layers, "head": config.n_heads, "query": n}
    for name, limit in limits.items():
        if getattr(request, name) >= limit:
            message = f"{name}: invalid value {getattr(request, name)}, expected below {limit}"
            raise bad_request(message, name)
    check_ids(request.ids, model.tokenizer.vocab_size, "ids")
    check_length(request.ids, config.context_length, "ids")
    if view == "why" and request.target is not None:
        check_ids([request.target], model.tokenizer.vocab_size, "target")
